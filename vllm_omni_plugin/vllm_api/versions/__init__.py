"""The supported versions of vLLM, and their differences. Importing this package does not import vLLM. The rest of the
code checks a named difference, never a version. Start with `supported`, then `differences`."""
