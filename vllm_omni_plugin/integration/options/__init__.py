"""Rules for flags, addresses to listen on, and how options are carried through vLLM. Start with `flag_rules`."""
