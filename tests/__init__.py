"""All tests. `make check` runs those that need no engine."""
