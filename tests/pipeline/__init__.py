"""Tests of pipelines: their graph, their files, and how both are shown."""
