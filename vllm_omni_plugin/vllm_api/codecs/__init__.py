"""Codecs of the engine-core protocol for the engine's side, and the filter of messages from heads. Start with
`stage_protocol`."""
