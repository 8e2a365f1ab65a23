"""What a head runs, from its command line and a pipeline's file: plans of stages, and the fleet that they make.

May import `integration.options` and every layer below `integration`. Start with `fleet`."""
