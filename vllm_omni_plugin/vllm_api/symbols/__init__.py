"""Every symbol of vLLM that this package uses, as plain data, one module for each part of vLLM.

Imports nothing of ours or vLLM's. Start with `all_symbols`, the list that the contract test reads.
"""
