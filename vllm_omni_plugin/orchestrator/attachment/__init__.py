"""Keeps the replicas of this node running, and this head attached to the replicas of other processes. Start with
`remote_replicas`."""
