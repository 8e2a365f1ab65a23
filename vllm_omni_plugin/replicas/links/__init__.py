"""Frames to and from one engine: ipc and tcp sockets, shared memory, connections that end.

Imports no other folder of `replicas`. Start with `link`.
"""
