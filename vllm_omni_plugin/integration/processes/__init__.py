"""The main functions of headless nodes, and of several API servers with their supervisor.

May import `integration.fleet_setup`, `integration.options` and `integration.command_line`. Start with
`serve_command`.
"""
