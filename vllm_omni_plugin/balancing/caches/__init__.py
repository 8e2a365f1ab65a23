"""The content of the replicas' prefix caches, and where several heads expect a prompt that they do not know. Start with
`prefix_caches`."""
