"""Starts, probes, restarts and stops the engines of this node. Start with `engine_keeper`."""
