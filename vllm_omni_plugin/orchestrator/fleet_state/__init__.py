"""Operator calls, and the state that they leave: on this head, on its replicas, and as the other heads know it. Start
with `fleet_calls`."""
