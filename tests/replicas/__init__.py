"""Tests of the replicas layer."""
