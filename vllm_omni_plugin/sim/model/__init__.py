"""A simulated engine without sockets, threads or a clock: its time, batches and cache.

Imports nothing else of `sim`. Start with `engine_model`.
"""
