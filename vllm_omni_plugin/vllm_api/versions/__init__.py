"""Which versions of vLLM are supported, and where they differ.

The rest of the code asks for a symbol or a behaviour by the name that it has here, never for a version. Start with
`supported`, then `differences`. Importing this imports nothing of vLLM.
"""
