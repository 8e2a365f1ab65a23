"""The replicas of one stage: which of them serve, their load, and the choice among them. Start with `stage_pool`."""
