"""The fleet's Prometheus metrics.

Imports no other folder of `admin`. Start with `fleet_metrics`.
"""
