"""Where vLLM calls us: its flags, what stands behind AsyncLLM, our part of the HTTP server."""
