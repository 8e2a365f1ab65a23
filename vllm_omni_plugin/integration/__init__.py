"""The code that vLLM calls: our flags, the engine client behind AsyncLLM, our part of the HTTP server.

May import every other layer but `sim`, and vLLM. Start with `flags`, which adds our flags to vLLM's parser, then
`command_line`, which turns parsed arguments into options.
"""
