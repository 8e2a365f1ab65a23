"""Starts, probes, restarts and stops the engines of this node.

Imports `replicas.remote`. Start with `engine_keeper`.
"""
