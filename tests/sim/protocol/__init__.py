"""Simulated engines on real sockets. Needs vLLM but no engine of its."""
