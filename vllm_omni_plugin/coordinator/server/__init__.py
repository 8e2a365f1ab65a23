"""The coordinator's thread: sockets in front of its tables.

Imports `coordinator.protocol` and `coordinator.state`. Start with `service`.
"""
