"""A simulated engine without sockets, threads or a clock: its time, batches and cache.

Imports no other module of `sim`. Start with `engine_model`.
"""
