"""A simulated engine without sockets, threads or a clock: its time, batches and cache. Start with `engine_model`."""
