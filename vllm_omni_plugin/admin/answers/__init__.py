"""What a pipeline adds to the body of an answer, and the request options for it.

Imports no other folder of `admin`. Start with `call_options`.
"""
