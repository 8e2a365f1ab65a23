"""Starting vLLM's engine processes and reading what they say when they are ready.

May import `vllm_api.symbols`, `curve` and the foundation. Start with `engine_launch`.
"""
