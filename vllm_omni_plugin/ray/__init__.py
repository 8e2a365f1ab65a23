"""`vllm-omni-plugin ray up`: runs headless nodes as actors of a Ray cluster, at the wanted number. Start with
`ray_command`. `autoscaler` sets the number of nodes, and `node_supervisor` starts and ends them. Only `ray_nodes`
imports Ray."""
