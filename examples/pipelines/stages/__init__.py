"""Transforms and Python stages of the example pipelines."""
