"""Images behind the fleet. vLLM caches processed images, and must not believe that every engine has seen them all."""

import base64
import io
from functools import partial
from pathlib import Path

import httpx
import pytest
from PIL import Image

from .both_replicas import answers_of_both
from .conftest import DEV_MODE, TWO_ENGINES, TWO_REPLICAS
from .server import MODEL, Server
from .servers import Servers
from .vision_model import TOKENS_PER_IMAGE, make_vision_model

SIDE = 56


@pytest.fixture(scope="session")
def vision_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("vision") / "model", tiny_model)


@pytest.fixture
def vision_fleet(servers: Servers, vision_model: Path) -> Server:
    return servers.get("vision-fleet", vision_model, *TWO_REPLICAS, engines=2, **TWO_ENGINES, **DEV_MODE)


def gradient(phase: int) -> str:
    """An image as a data URL; another phase is another image."""
    pixels = bytes(v % 256 for y in range(SIDE) for x in range(SIDE) for v in (4 * x + phase, 4 * y, phase))
    image = Image.frombytes("RGB", (SIDE, SIDE), pixels)
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def describe(server: Server, *images: str) -> tuple[str, int]:
    """What the model says of the images, and how many tokens went in."""
    parts = [{"type": "image_url", "image_url": {"url": image}} for image in images]
    content = [*parts, {"type": "text", "text": "What is this?"}]
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 16, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60.0).raise_for_status().json()
    return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"]


def test_a_repeated_image_is_seen_alike_by_every_replica(vision_fleet: Server) -> None:
    image = gradient(10)
    fresh = describe(vision_fleet, image)
    for _ in range(2):
        assert set(answers_of_both(vision_fleet, partial(describe, vision_fleet, image))) == {fresh}
    assert vision_fleet.replicas_up() == 2


def test_images_are_told_apart(vision_fleet: Server) -> None:
    one, other = gradient(20), gradient(120)
    answers = [describe(vision_fleet, image)[0] for image in (one, other, one, other)]
    assert answers[:2] == answers[2:]
    assert answers[0] != answers[1]


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
