"""What a pipeline adds to the body of an answer, and the options of a request that ask for it.

Imports no other folder of `admin`. Start with `call_options`.
"""
