"""Images behind the fleet. vLLM caches processed images, and must not believe that every engine has seen them all."""

import base64
import io
import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Event
from typing import Any

import httpx
import pytest
from PIL import Image

from .both_replicas import answers_of_both
from .server import IN_FLIGHT, MODEL, MOVES, Server, until
from .suspended import engines_of
from .vision_model import TOKENS_PER_IMAGE

SIDE = 56
LONG = 700
"""Tokens of an answer that is not over when its engine is killed after the first of them."""


def gradient(phase: int) -> str:
    """An image as a data URL; another phase is another image."""
    pixels = bytes(v % 256 for y in range(SIDE) for x in range(SIDE) for v in (4 * x + phase, 4 * y, phase))
    image = Image.frombytes("RGB", (SIDE, SIDE), pixels)
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def question(*images: str, tokens: int) -> dict[str, Any]:
    """A chat request about images."""
    parts = [{"type": "image_url", "image_url": {"url": image}} for image in images]
    content = [*parts, {"type": "text", "text": "What is this?"}]
    messages = [{"role": "user", "content": content}]
    return {"model": MODEL, "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def describe(server: Server, *images: str, tokens: int = 16) -> tuple[str, int]:
    """What the model says of the images, and how many tokens went in."""
    body = question(*images, tokens=tokens)
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60.0).raise_for_status().json()
    return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"]


def test_images_are_told_apart_and_a_repeated_one_is_seen_alike_by_every_replica(vision_fleet: Server) -> None:
    image, other = gradient(10), gradient(120)
    fresh = describe(vision_fleet, image)
    assert describe(vision_fleet, other) != fresh
    for _ in range(2):
        assert set(answers_of_both(vision_fleet, partial(describe, vision_fleet, image))) == {fresh}
    assert vision_fleet.replicas_up() == 2


def test_a_known_and_a_new_image_may_come_in_one_request(vision_fleet: Server) -> None:
    known, new = gradient(30), gradient(130)
    _, tokens = describe(vision_fleet, known)
    together = describe(vision_fleet, known, new)
    assert together[1] > tokens + TOKENS_PER_IMAGE
    assert set(answers_of_both(vision_fleet, partial(describe, vision_fleet, known, new))) == {together}


def test_an_image_is_seen_again_after_the_caches_were_cleared(vision_fleet: Server) -> None:
    image = gradient(40)
    before = set(answers_of_both(vision_fleet, partial(describe, vision_fleet, image)))
    for cache in ("mm", "encoder", "prefix"):
        assert httpx.post(f"{vision_fleet.url}/reset_{cache}_cache", timeout=60.0).status_code == 200
    assert set(answers_of_both(vision_fleet, partial(describe, vision_fleet, image))) == before


def stream(server: Server, image: str, begun: Event) -> str:
    """The whole text of a long stream about an image."""
    body = question(image, tokens=LONG) | {"stream": True}
    text = ""
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=120.0) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content") or ""
            if text:
                begun.set()
    return text


@pytest.mark.long
def test_a_stream_about_an_image_goes_on_elsewhere_when_its_engine_is_killed(vision_fleet: Server) -> None:
    image, begun, before = gradient(50), Event(), vision_fleet.total(MOVES)
    whole, _ = describe(vision_fleet, image, tokens=LONG)
    engines = engines_of(vision_fleet)
    for engine in engines.values():
        engine.suspend()
    with ThreadPoolExecutor(1) as thread:
        text = thread.submit(stream, vision_fleet, image, begun)
        busy = until(partial(busy_replica, vision_fleet), "the request is assigned")
        while not begun.wait(1.0):
            engines[busy].run_for_a_moment()
        engines[busy].core.kill()
        for engine in engines.values():
            engine.resume()
        assert text.result() == whole
    assert vision_fleet.total(MOVES) == before + 1


def busy_replica(server: Server) -> str | None:
    in_flight = server.by_replica(IN_FLIGHT)
    return next((replica for replica, count in in_flight.items() if count), None)
