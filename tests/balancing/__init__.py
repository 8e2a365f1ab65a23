"""Tests of the balancing layer."""
