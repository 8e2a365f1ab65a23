"""The main functions of headless nodes, and of several API servers with their supervisor. See `serve_command`."""
