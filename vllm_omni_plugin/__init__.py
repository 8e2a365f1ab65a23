"""vLLM as a fleet: one OpenAI server, a pool of engine replicas, every request balanced by live load."""
