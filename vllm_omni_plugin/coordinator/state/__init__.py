"""What the coordinator knows, as pure tables: replicas, their numbers, heads' sessions, operator calls.

Imports `coordinator.protocol`. Start with `membership_table`.
"""
