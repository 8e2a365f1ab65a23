"""Links to one engine and the client on them: the engine-core protocol, ipc sockets, shared memory, ports.

Imports no other folder of `replicas`. Start with `link`, then `engine_client`.
"""
