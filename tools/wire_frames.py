"""Records a frame of each message of the wire, with every key, for the tests of the two versions after this one.

python -m tools.wire_frames
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from msgspec import inspect

from vllm_omni_plugin.coordinator.protocol import control_messages, head_messages
from vllm_omni_plugin.replicas.control import lease_messages

FOLDER = Path(__file__).parents[1] / "tests" / "coordinator" / "frames"
READERS: Mapping[str, tuple[Callable[[bytes], Any], tuple[type, ...]]] = {
    "from replicas": (control_messages.decode_event, (control_messages.ReplicaEvent,)),
    "to subscribers": (control_messages.decode_replica_list, (control_messages.ReplicaList,)),
    "from heads": (head_messages.decode_from_head, (head_messages.HeadQuery, *get_args(head_messages.FromHead))),
    "to heads": (head_messages.decode_to_head, get_args(head_messages.ToHead)),
    "to nodes": (lambda frame: [head_messages.decode_head_info(frame)], (head_messages.HeadInfo,)),
    "to servers": (lease_messages.decode_to_server, get_args(lease_messages.ToServer)),
    "from servers": (lease_messages.decode_from_server, get_args(lease_messages.FromServer)),
}
"""By direction: what reads its frames, and which messages there are."""


def sample(kind: inspect.Type) -> Any:
    """A value of a type, as JSON has it, with no field at its default."""
    match kind:
        case inspect.StructType(array_like=True) | inspect.NamedTupleType():
            return [sample(field.type) for field in kind.fields]
        case inspect.StructType():
            tag = {} if kind.tag is None else {kind.tag_field: kind.tag}
            # A bool is the other one than its default.
            values = {field.encode_name: (sample(field.type), field.default) for field in kind.fields}
            return tag | {name: not value if value is default else value for name, (value, default) in values.items()}
        case inspect.ListType() | inspect.VarTupleType() | inspect.FrozenSetType():
            return [sample(kind.item_type)]
        case inspect.TupleType():
            return [sample(each) for each in kind.item_types]
        case inspect.DictType():
            return {sample(kind.key_type): sample(kind.value_type)}
        case inspect.UnionType():
            return sample(next(each for each in kind.types if not isinstance(each, inspect.NoneType)))
        case inspect.EnumType() | inspect.LiteralType():
            return list(kind.cls)[-1] if isinstance(kind, inspect.EnumType) else kind.values[-1]
        case inspect.StrType():
            return "x" * max(1, kind.min_length or 0)
    return {inspect.IntType: 2, inspect.FloatType: 3.5, inspect.BytesType: "AAAA"}.get(type(kind), True)


def lines_of() -> Iterator[str]:
    """Each message as one line: its direction, a colon and its frame."""
    for direction, (_, messages) in READERS.items():
        for message in map(sample, inspect.multi_type_info(messages)):
            frame = [message] if direction in ("to heads", "to nodes") else message
            yield f"{direction}: {json.dumps(frame)}\n"


if __name__ == "__main__":
    versions = f"session-{head_messages.SESSION_PROTOCOL}-lease-{lease_messages.PROTOCOL_VERSION}"
    (FOLDER / f"{versions}.txt").write_text("".join(lines_of()))
