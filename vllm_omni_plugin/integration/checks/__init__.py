"""Checks before a start, also run by `vllm-omni-plugin doctor`. Start with `start_checks`."""
