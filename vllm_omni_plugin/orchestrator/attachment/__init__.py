"""Keeps the replicas of this node running, and this head attached to the replicas of other processes.

Imports everything else here. Start with `remote_replicas`.
"""
