"""One request in one stage: its state machine, its charges, and the messages about it. Start with `stage_run`."""
