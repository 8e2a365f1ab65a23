"""Load-balancing policies of Acme."""
