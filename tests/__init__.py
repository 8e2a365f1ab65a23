"""All tests. `make test-fast` runs those that need no engine."""
