"""The load of each replica, and an estimate of what other heads have not reported yet.

May import `interface`. Start with `replica_load`.
"""
