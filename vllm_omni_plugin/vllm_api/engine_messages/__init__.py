"""vLLM's request and output structs: read, built, checked, and changed for another replica.

May import `balancing` and the foundation only. Start with `engine_api`.
"""
