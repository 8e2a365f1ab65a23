"""Simulated engines: the model by itself, its protocol over real sockets, and the command."""
