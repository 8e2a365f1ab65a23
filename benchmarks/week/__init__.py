"""A week of a head's life in simulated time: its real orchestrator, and replicas and clients that are played."""
