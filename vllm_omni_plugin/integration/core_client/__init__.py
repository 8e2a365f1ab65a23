"""The engine-core client of AsyncLLM, and updates of AsyncLLM's own parts when the fleet changes.

May import `integration.fleet_setup`, `integration.options` and every layer below `integration`. Start with
`fleet_client`.
"""
