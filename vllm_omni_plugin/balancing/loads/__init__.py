"""What replicas have to do, as numbers: what is in flight, and what other heads have not reported yet.

May import `interface`. Start with `replica_load`.
"""
