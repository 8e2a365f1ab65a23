"""`vllm-omni-plugin ray up`: headless nodes as actors of a Ray cluster, kept at the wanted number.

Start with `ray_command`; `keeping` is the loop, `node_set` and `scaler` decide. Only `ray_nodes` imports Ray.
"""
