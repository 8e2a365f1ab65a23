"""What this package uses of vLLM's engine, behind its own small types. Imported lazily: it pulls in vLLM and torch."""
