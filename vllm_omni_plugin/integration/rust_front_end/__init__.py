"""The fleet behind vLLM's Rust front end, a child process that takes it for one engine: no AsyncLLM, no FastAPI app of
vLLM. Operators have an HTTP server of their own, `admin_server`. Start with `serve`."""
