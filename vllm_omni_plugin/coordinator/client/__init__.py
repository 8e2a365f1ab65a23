"""The three clients of a coordinator: a replica, a head, and a third party that reads the list.

Imports `coordinator.protocol`. Start with `head_client`.
"""
