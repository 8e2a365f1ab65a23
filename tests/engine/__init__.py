"""Tests against the real vLLM engine on the CPU. Their servers are shared, since each takes half a minute to start."""
