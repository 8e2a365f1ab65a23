"""Operator calls, and the state that they leave: on this head, on its replicas, and as the other heads know it.

Imports `orchestrator.orchestrator` and what that imports. Start with `fleet_calls`.
"""
