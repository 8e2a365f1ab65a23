"""What the fleet shows of itself: read-only views over the orchestrator's state."""
