"""Tests of the nodes on Ray. None here needs Ray; `tests/engine/test_ray_nodes.py` has a cluster."""
