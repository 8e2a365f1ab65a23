"""What a head and a replica server say to each other beside the data path: attach, lease, beat, leave.

Imports `replicas.links` and `replicas.kv_events`. Start with `lease_messages`.
"""
