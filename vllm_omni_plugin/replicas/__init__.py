"""Engine replicas: their links and clients, local engines, and the replica server that shares an engine."""
