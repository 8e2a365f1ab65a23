"""The control connection of a head and a replica server: attach, renew the lease, detach.

Imports `replicas.links` and `replicas.kv_events`. Start with `lease_messages`.
"""
