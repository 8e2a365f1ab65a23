"""Requests of one stage sent, moved and held.

Imports `orchestrator.requests` and `orchestrator.pool`. Start with `dispatcher`.
"""
