"""The fleet's Prometheus metrics, computed when they are scraped.

Imports no other folder of `admin`. Start with `fleet_metrics`.
"""
