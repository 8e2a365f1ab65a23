"""Files that people write: YAML, its JSON Schema, and messages that name the line and the key."""

from vllm_omni_plugin.documents.document import Document, read
from vllm_omni_plugin.documents.shape import validate
from vllm_omni_plugin.documents.text_places import Place, worded

__all__ = ["Document", "Place", "read", "validate", "worded"]
