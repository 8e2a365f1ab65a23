"""Where vLLM calls us: its flags, what stands behind AsyncLLM, our part of the HTTP server.

May import every other layer but `sim`, and vLLM. Start with `flags`, which adds our flags to vLLM's parser, then
`command_line`, which makes of them what `async_llm` and `processes` need.
"""
