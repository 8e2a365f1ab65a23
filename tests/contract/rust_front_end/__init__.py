"""The fleet behind vLLM's Rust front end, and that program itself. Needs a vLLM that has it."""
