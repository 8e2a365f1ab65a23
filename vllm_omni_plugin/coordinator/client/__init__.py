"""The coordinator's clients: for a replica, for a head, and for a subscriber that only reads the replica list."""
