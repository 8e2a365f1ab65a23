"""Plans the stages of a head from its command line and pipeline file, and starts them. Start with `fleet`."""
