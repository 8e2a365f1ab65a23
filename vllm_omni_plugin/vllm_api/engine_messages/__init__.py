"""vLLM's request and output structs: read, built, checked, and changed for another replica. Start with `engine_api`."""
