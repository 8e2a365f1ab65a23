"""Keeping replicas: those of this node running, those of others attached.

Imports everything else here. Start with `remote_replicas`.
"""
