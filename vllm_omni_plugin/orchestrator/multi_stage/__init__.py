"""Requests of a pipeline: how they go from stage to stage, whole or in chunks.

Imports `orchestrator.requests` and `orchestrator.dispatch`. Start with `pipeline_requests`.
"""
