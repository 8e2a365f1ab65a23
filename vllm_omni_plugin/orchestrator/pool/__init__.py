"""The replicas of one stage: which of them serve, their load, and the choice among them.

Imports `orchestrator.requests`. Start with `stage_pool`.
"""
