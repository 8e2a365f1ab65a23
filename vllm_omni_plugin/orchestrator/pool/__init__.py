"""The replicas of one stage: who serves, what each has to do, and who gets the next request.

Imports `orchestrator.requests`. Start with `stage_pool`.
"""
