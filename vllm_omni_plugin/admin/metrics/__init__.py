"""The fleet's Prometheus metrics. Start with `fleet_metrics`."""
