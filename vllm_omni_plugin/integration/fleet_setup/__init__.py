"""Plans the stages of a head from its command line and pipeline file, and starts them.

May import `integration.options` and every layer below `integration`. Start with `fleet`."""
