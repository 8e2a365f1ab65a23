"""The content of an engine's prefix cache: from vLLM's KV cache events to the heads that subscribe. Start with
`cache_listener`, then `cache_polling`."""
