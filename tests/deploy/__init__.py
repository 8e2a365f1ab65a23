"""What lies in deploy/ and examples/slurm: rendered, checked against schemas, and run."""
