"""Python stages: real processes, real sockets, small classes."""
