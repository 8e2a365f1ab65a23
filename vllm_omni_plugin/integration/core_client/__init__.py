"""The engine-core client of AsyncLLM, and updates of AsyncLLM's own parts when the fleet changes. Start with
`fleet_client`."""
