"""Runs the coordinator in its own process. The parent watches the process and restarts it."""
