"""The client of one replica in a head.

Imports `replicas.links`, `replicas.control` and `replicas.kv_events`. Start with `engine_client`.
"""
