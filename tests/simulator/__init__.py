"""Tests of what is in benchmarks/: the simulator, and the processes of the others."""
