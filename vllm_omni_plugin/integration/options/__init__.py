"""Which of our flags go together, where processes listen, and how options travel through vLLM.

May import `admin`, `replicas`, `curve` and the foundation. Start with `flag_rules`."""
