"""One request in one stage: its state machine, what it weighs, and the messages that bring it.

Imports no other folder of `orchestrator`. Start with `stage_run`.
"""
