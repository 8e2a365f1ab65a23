"""What is known of the replicas' prefix caches, and where heads look for a prompt that they do not know.

May import `interface`, `prompt` and `loads`. Start with `prefix_caches`.
"""
