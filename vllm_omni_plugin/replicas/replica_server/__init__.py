"""The replica server of a headless node: an engine that several heads share. Start with `replica_server`."""
