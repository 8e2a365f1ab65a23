"""Messages, codecs, and sockets with their limits, for all ends of the coordinator's connections."""
