"""Rules for flags, addresses to listen on, and how options are carried through vLLM.

May import `admin`, `replicas`, `curve` and the foundation. Start with `flag_rules`."""
