"""The replica server of a headless node: an engine that is shared by the heads that attach.

Imports all other folders of `replicas`. Start with `replica_server`.
"""
