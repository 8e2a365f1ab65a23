"""The order of requests, refusals, and the admission file."""
