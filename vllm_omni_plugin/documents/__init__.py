"""YAML files written by users: parsing, JSON Schema, and errors that name the line and the key."""

from vllm_omni_plugin.documents.document import Document, Place, at_place, read
from vllm_omni_plugin.documents.schema_check import validate

__all__ = ["Document", "Place", "at_place", "read", "validate"]
