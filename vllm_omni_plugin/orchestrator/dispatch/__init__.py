"""Requests of one stage assigned, sent, moved and held. Start with `dispatcher`."""
