"""The built-in policies, one module each. Start with `least_queue_length`, then `prefix_policy`."""
