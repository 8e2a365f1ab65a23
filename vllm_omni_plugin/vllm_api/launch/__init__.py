"""Starting vLLM's engine processes and reading what they say when they are ready.

May import `curve` and the foundation. Start with `engine_launch`.
"""
