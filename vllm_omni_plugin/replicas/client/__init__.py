"""One replica as a head sees it: the client of its engine, however the link was opened.

Imports `replicas.links`, `replicas.control` and `replicas.kv_events`. Start with `stage_client`.
"""
