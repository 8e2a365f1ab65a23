"""Calls that all replicas must get, now and later, and what heads of one fleet tell each other.

Imports `orchestrator.requests`, `.pool` and `.pipeline`. Start with `fan_out`.
"""
