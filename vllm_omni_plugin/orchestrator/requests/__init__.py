"""One request in one stage: its state machine, its charges, and the messages about it.

Imports no other folder of `orchestrator`. Start with `stage_run`.
"""
