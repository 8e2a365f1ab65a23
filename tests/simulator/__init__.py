"""Tests of the simulator in benchmarks/."""
