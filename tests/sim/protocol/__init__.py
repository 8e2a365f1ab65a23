"""Simulated engines on real sockets. Needs vLLM but none of its engines."""
