"""The content of the replicas' prefix caches, and where several heads expect a prompt that they do not know.

May import `interface` and `loads`. Start with `prefix_caches`.
"""
