"""The processes of a node that are no single API server: headless nodes, and several API servers with their supervisor.

May import `integration.fleet_setup`, `integration.options` and `integration.command_line`. Start with
`serve_command`.
"""
