"""Starts vLLM's engine processes. Start with `engine_launch`."""
