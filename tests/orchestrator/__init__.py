"""Tests of the orchestrator layer."""
