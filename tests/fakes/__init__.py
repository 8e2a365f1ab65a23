"""Stand-ins for the engine and for the ways to it, whose life and timing a test controls."""
