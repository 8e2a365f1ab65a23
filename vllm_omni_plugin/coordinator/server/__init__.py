"""The coordinator's thread: it connects the sockets with the tables of `coordinator.state`."""
