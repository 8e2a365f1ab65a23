"""Sockets to one engine: ipc and tcp links, shared memory, ports, connection state.

Imports no other folder of `replicas`. Start with `link`.
"""
