"""What a pipeline adds to the body of an answer, and the request options for it. Start with `call_options`."""
