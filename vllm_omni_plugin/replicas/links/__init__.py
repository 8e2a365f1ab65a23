"""Links to one engine and the client on them: the engine-core protocol, ipc sockets, shared memory, ports. Start with
`link`, then `engine_client`."""
