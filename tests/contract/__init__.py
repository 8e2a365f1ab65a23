"""What we rely on of the installed vLLM, checked symbol by symbol. Needs vLLM but no engine."""
