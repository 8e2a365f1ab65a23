"""Blocks as engines name them become the keys under which policies look prompts up."""

from typing import Any

import msgspec
import pytest

from vllm_omni_plugin.balancing import CacheChange, Prompt
from vllm_omni_plugin.balancing.caches.block_keys import prompt_keys
from vllm_omni_plugin.errors import WireError
from vllm_omni_plugin.replicas.kv_events.cached_blocks import CachedBlocks
from vllm_omni_plugin.replicas.kv_events.engine_events import BlockRemoved, BlockStored, decode_events

SIZE = 4
TOKENS = list(range(100, 112))
# One token more than the blocks hold: the last token of a prompt is never looked up.
KEYS = tuple(prompt_keys(Prompt([*TOKENS, 0]), SIZE))


def stored(*hashes: int, parent: int | None = None, first: int = 0, **other: object) -> BlockStored:
    """The event of blocks of `TOKENS` from index `first` on, with these hashes."""
    tokens = TOKENS[first * SIZE : (first + len(hashes)) * SIZE]
    return msgspec.convert(
        {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": parent,
            "token_ids": tokens,
            "block_size": SIZE,
            **other,
        },
        BlockStored,
    )


def removed(*hashes: int, **other: object) -> BlockRemoved:
    return msgspec.convert({"type": "BlockRemoved", "block_hashes": hashes, **other}, BlockRemoved)


def as_sent(event: BlockStored | BlockRemoved) -> dict[str, Any]:
    return {"type": type(event).__name__, **msgspec.structs.asdict(event)}


def test_blocks_stored_at_once_or_one_after_another_have_the_keys_of_their_prompt() -> None:
    assert CachedBlocks().apply([stored(1, 2, 3)]).stored == KEYS
    names = CachedBlocks()
    assert names.apply([stored(1)]).stored == KEYS[:1]
    assert names.apply([stored(2, 3, parent=1, first=1)]).stored == KEYS[1:]


def test_a_block_with_several_hashes_is_reusable_until_the_last_hash_is_removed() -> None:
    names = CachedBlocks()
    names.apply([stored(1, lookahead_token_ids=[[7]]), stored(2, lookahead_token_ids=[[8]])])
    assert names.apply([removed(1)]) == CacheChange()
    assert names.apply([stored(1, lookahead_token_ids=[[7]]), removed(2)]).removed == ()
    assert names.apply([removed(1)]).removed == KEYS[:1]


def test_a_block_is_reusable_until_its_last_copy_is_removed() -> None:
    names = CachedBlocks()
    names.apply([stored(1, 2)])
    names.apply([stored(1, 2), stored(1)])
    assert names.copies == 5
    assert names.apply([removed(1, 2)]) == CacheChange()
    assert names.apply([removed(1, 2)]).removed == KEYS[1:2]
    assert names.apply([removed(1)]).removed == KEYS[:1]
    assert names.copies == 0


def test_the_last_event_of_a_block_in_a_batch_counts() -> None:
    names = CachedBlocks()
    assert names.apply([stored(1), removed(1), stored(1)]) == CacheChange(stored=KEYS[:1])
    assert names.apply([removed(1), stored(1), removed(1)]) == CacheChange(removed=KEYS[:1])


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(stored(7, parent=6, first=1), id="its chain began before we listened"),
        pytest.param(stored(7, medium="CPU"), id="in other memory"),
        pytest.param(stored(7, group_idx=1), id="of another group"),
        pytest.param(stored(7, kv_cache_spec_kind="sliding_window"), id="of a sliding window"),
        pytest.param(stored(7, extra_keys=[[b"digest"]]), id="of embeddings"),
        pytest.param(stored(7, extra_keys=[None, None]), id="more extra keys than blocks"),
        pytest.param(msgspec.structs.replace(stored(7), token_ids=TOKENS), id="more tokens than blocks"),
        pytest.param(removed(7), id="removed and never seen"),
    ],
)
def test_events_of_unusable_blocks_are_ignored(event: BlockStored | BlockRemoved) -> None:
    names = CachedBlocks()
    assert names.apply([event]) == CacheChange()
    assert names.copies == 0


def test_a_removal_from_other_memory_is_ignored() -> None:
    names = CachedBlocks()
    names.apply([stored(1)])
    assert names.apply([removed(1, medium="CPU"), removed(1, group_idx=1)]) == CacheChange()


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param(b"\xc1", id="no msgpack"),
        pytest.param(msgspec.msgpack.encode([1.0]), id="no events"),
        pytest.param(msgspec.msgpack.encode([1.0, [{"type": "BlockRemoved", "block_hashes": 1}]]), id="wrong type"),
        pytest.param(msgspec.msgpack.encode([1.0, [{"block_hashes": [1]}]]), id="no kind"),
        pytest.param(msgspec.msgpack.encode([1.0, [7]]), id="no event"),
    ],
)
def test_a_malformed_batch_is_refused(batch: bytes) -> None:
    with pytest.raises(WireError, match="batch of cache events"):
        decode_events(batch)


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        pytest.param({"type": "Nonsense"}, "Nonsense: Invalid value", id="unknown kind"),
        pytest.param(
            as_sent(stored(9)) | {"token_ids": [-1]}, "BlockStored: Expected `int` >= 0", id="token below zero"
        ),
        pytest.param(as_sent(stored(9)) | {"block_hashes": "h"}, "BlockStored: Expected `array`", id="wrong type"),
    ],
)
def test_an_invalid_event_is_skipped_and_the_others_of_its_batch_are_used(event: dict[str, Any], reason: str) -> None:
    skipped: list[str] = []
    batch = [as_sent(stored(1)), event, as_sent(stored(2, parent=1, first=1)), as_sent(removed(1))]
    events = decode_events(msgspec.msgpack.encode([1.0, batch]), skipped.append)
    assert CachedBlocks().apply(events) == CacheChange(stored=KEYS[1:2], removed=KEYS[:1])
    assert len(skipped) == 1
    assert skipped[0].startswith(reason)
