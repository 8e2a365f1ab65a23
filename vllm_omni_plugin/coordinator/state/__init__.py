"""The coordinator's tables, without sockets or clocks: replicas and their ids, heads, operator calls."""
