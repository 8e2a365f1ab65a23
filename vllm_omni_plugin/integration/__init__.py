"""Where vLLM calls us: its flags, the door between AsyncLLM and the engines, what AsyncLLM may ask."""
