"""Requests of a pipeline: how they go from stage to stage, whole or in chunks. Start with `pipeline_requests`."""
