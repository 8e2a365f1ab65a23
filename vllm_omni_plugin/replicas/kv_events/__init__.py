"""What an engine's prefix cache holds, from vLLM's KV cache events to the heads that follow it.

May import `balancing`, and of `replicas` the messages and links. Start with `cache_listener`, then `cache_polling`.
"""
