"""The engine client that AsyncLLM gets, and what keeps AsyncLLM's own parts in step with the fleet.

May import `integration.fleet_setup`, `integration.options` and every layer below `integration`. Start with
`fleet_client`.
"""
