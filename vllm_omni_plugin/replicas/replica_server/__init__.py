"""The replica server of a headless node: an engine that several heads share.

Imports all other folders of `replicas`. Start with `replica_server`.
"""
