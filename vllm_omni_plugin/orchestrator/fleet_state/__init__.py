"""Calls that all replicas must get, now and later, and what heads of one fleet tell each other.

Imports `orchestrator.orchestrator` and what that imports. Start with `fleet_calls`.
"""
