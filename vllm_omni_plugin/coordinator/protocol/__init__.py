"""What replicas, heads and the coordinator say to each other: messages, codecs, sockets and their limits.

Imports no other folder of `coordinator`. Start with `control_messages`.
"""
