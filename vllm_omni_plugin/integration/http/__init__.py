"""Our part of vLLM's HTTP server: routes, middleware, and the responses of pipelines. Start with `app`."""
