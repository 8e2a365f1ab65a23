"""Starts, probes, restarts and stops the engines of this node.

Imports `replicas.client`. Start with `engine_keeper`.
"""
