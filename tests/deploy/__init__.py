"""Tests of deploy/ and examples/slurm."""
