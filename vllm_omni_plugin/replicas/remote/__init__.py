"""A head's side of a replica of another process: attaching, the lease, the link, the loss. See `remote_replica`."""
