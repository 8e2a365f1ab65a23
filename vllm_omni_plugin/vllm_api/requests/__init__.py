"""vLLM's request and output structs: read, built, moved to another replica, checked.

May import `balancing` and the foundation only. Start with `engine_api`.
"""
