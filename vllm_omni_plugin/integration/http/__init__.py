"""Our part of vLLM's HTTP server: routes, middleware, and the responses of pipelines.

May import `integration.core_client` and what that may import. Start with `app`."""
