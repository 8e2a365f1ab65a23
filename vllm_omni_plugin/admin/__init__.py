"""Operator's view of a fleet over HTTP: routes, access control, metrics, explanations, and the middleware of requests.
Start with `routes`, or with `hold` for waiting requests."""
