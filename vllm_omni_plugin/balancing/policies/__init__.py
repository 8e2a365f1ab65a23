"""The built-in policies, one module for each.

May import the rest of `balancing`, but for the registry. Start with `least_queue_length`, then `prefix_policy`.
"""
