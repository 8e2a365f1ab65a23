"""The coordinator in a process of its own, watched and started again by its parent.

Imports `coordinator.server`. Start with `runtime`.
"""
