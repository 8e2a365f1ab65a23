"""Starts vLLM's engine processes.

May import `curve` and the foundation. Start with `engine_launch`.
"""
