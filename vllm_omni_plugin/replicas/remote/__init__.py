"""A head's side of a replica of another process: attaching, the lease, the link, the loss.

Imports `replicas.links`, `replicas.control` and `replicas.kv_events`. Start with `remote_replica`.
"""
