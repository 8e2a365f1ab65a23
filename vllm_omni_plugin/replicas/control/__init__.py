"""The control connection of a head and a replica server: attach, renew the lease, detach. See `lease_messages`."""
