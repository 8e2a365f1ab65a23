"""Tests of the admin layer."""
