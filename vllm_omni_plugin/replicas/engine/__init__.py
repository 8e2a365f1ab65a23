"""An engine of this node: started, probed, restarted, ended.

Imports `replicas.client`. Start with `engine_keeper`.
"""
