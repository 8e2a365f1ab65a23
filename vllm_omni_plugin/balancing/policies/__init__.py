"""The built-in policies, one module each.

May import all of `balancing` except the registry. Start with `least_queue_length`, then `prefix_policy`.
"""
