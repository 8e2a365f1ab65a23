"""Messages of a hostile peer: through ZMQ sockets, and as raw bytes to ZMTP ports."""

import random
from collections.abc import Sequence

MAX_FRAMES = 4
MAX_RANDOM_BYTES = 300
# Signature, version 3.1, mechanism and filler: what a ZMTP peer sends first (RFC 37).
_GREETING_START = b"\xff" + bytes(8) + b"\x7f\x03\x01"
_MECHANISMS = (b"NULL", b"PLAIN", b"CURVE", b"GSSAPI", b"\x00" * 20, b"A" * 20)
_COMMANDS = (b"\x05READY", b"\x05HELLO", b"\x08INITIATE", b"\x05ERROR", b"\x04PING", b"\x09SUBSCRIBE", b"\x07MESSAGE")


def hostile_message(rng: random.Random, samples: Sequence[bytes]) -> list[bytes]:
    """The frames of one message: random ones, or `samples` changed at random."""
    count = 1 if rng.random() < 0.8 else rng.randrange(2, MAX_FRAMES + 1)
    return [_hostile_frame(rng, samples) for _ in range(count)]


def hostile_stream(rng: random.Random, frames: int) -> bytes:
    """A greeting, valid or broken, and `frames` frames, as sent by a peer without a handshake."""
    if rng.random() < 0.2:
        return rng.randbytes(rng.randrange(1, MAX_RANDOM_BYTES))
    greeting = (_GREETING_START + rng.choice(_MECHANISMS).ljust(20, b"\x00") + bytes([rng.randrange(2)])).ljust(
        64, b"\x00"
    )
    if rng.random() < 0.2:
        greeting = _mutated(rng, greeting)
    return greeting + b"".join(_wire_frame(rng) for _ in range(frames))


def _hostile_frame(rng: random.Random, samples: Sequence[bytes]) -> bytes:
    kind = rng.randrange(4)
    if kind == 0:
        return rng.randbytes(rng.randrange(MAX_RANDOM_BYTES))
    sample = rng.choice(samples)
    if kind == 1:
        return sample[: rng.randrange(len(sample))]
    if kind == 2:
        start, end = sorted(rng.randrange(len(sample)) for _ in range(2))
        return sample[:end] + sample[start:]
    return _mutated(rng, sample)


def _mutated(rng: random.Random, sample: bytes) -> bytes:
    mutant = bytearray(sample)
    for _ in range(rng.randrange(1, 6)):
        mutant[rng.randrange(len(mutant))] = rng.randrange(256)
    return bytes(mutant)


def _wire_frame(rng: random.Random) -> bytes:
    flags = rng.randrange(8)
    body = rng.choice(_COMMANDS) + rng.randbytes(rng.randrange(100)) if flags & 4 else rng.randbytes(rng.randrange(100))
    is_long = bool(flags & 2)
    # Sometimes a wrong length, up to one that fits in no memory.
    length = len(body) if rng.random() < 0.9 else rng.randrange(2**63 if is_long else 256)
    return bytes([flags]) + length.to_bytes(8 if is_long else 1, "big") + body
