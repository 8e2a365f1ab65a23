"""What vLLM's plugin loader calls."""
