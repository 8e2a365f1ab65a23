"""Requests of one stage assigned, sent, moved and held.

Imports `orchestrator.requests` and `orchestrator.pool`. Start with `dispatcher`.
"""
