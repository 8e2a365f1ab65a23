"""What is looked at before anything starts, and by `vllm-omni-plugin doctor`.

Start with `start_checks`.
"""
