"""The configuration of Prometheus and Grafana in examples/monitoring."""
