"""Discrete-event simulation of a fleet: engines that leap from event to event, workloads, policies and their rivals."""
