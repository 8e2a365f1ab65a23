"""A replica over several machines: they meet, run one engine together, and meet again when one of them is lost. Start
with `meetings`."""
