"""The arithmetic of the soak: trends, verdicts, and accounts in which no request is missing."""

import asyncio
import random
import sys
from collections import Counter
from pathlib import Path

import httpx
import pytest
from held import COUNTING, count, entries, held_by, in_shared_memory
from mixed_traffic import Accounts, End, Traffic
from processes import Process, wait_for
from soak_evenness import Evenness
from soak_report import UNCLEAR, UNSOUND, Look, Soak, report
from trends import Trend, trend

HOURS = [number / 60 for number in range(60)]


def noisy(slope: float, noise: float, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [500 + slope * hour + rng.gauss(0, noise) for hour in HOURS]


def test_the_slope_of_a_line_is_exact_and_other_bounds_are_those_computed_by_hand() -> None:
    found = trend(HOURS, [3 + 2 * hour for hour in HOURS])
    assert (found.slope, found.low, found.high) == pytest.approx((2, 2, 2))
    assert found.samples == 48
    # Without the first sample: slopes 1, 2, 3, 3, 4, 5. With so few points, the bounds are the outermost slopes.
    found = trend([0, 1, 2, 3, 4], [99, 1, 2, 5, 10])
    assert (found.slope, found.low, found.high) == pytest.approx((3, 1, 5))
    assert (found.first, found.last, found.samples) == (1, 10, 4)


@pytest.mark.parametrize("slope", [0.0, 20.0, -20.0])
def test_the_true_slope_is_within_the_bounds_in_about_95_percent(slope: float) -> None:
    found = [trend(HOURS, noisy(slope, 3.0, seed)) for seed in range(200)]
    assert 180 <= sum(each.low <= slope <= each.high for each in found) <= 199


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param([40.0] * 50 + [90.0, 80.0, 95.0, 70.0] + [40.0] * 6, "flat", id="outliers"),
        pytest.param([float(min(number, 11)) for number in range(60)], "flat", id="grows only at first"),
        pytest.param([40.0 + number // 10 for number in range(60)], "grows", id="one more in every tenth round"),
    ],
)
def test_the_verdict_on_an_hour(values: list[float], expected: str) -> None:
    assert trend(HOURS, values).verdict(allowed=0.5) == expected


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 0, "flat"),
        (-3, -1, "flat"),
        (0.1, 0.9, "flat"),
        (-1, 5, "unclear"),
        (0, 5, "unclear"),
        (0.1, 5, "grows"),
        (2, 5, "grows"),
    ],
)
def test_a_verdict_needs_confidence(low: float, high: float, expected: str) -> None:
    assert Trend(9, 1, 1, (low + high) / 2, low, high).verdict(allowed=1) == expected


def test_too_few_samples_are_no_trend() -> None:
    with pytest.raises(ValueError, match="3 samples are too few"):
        trend([0, 1, 2], [1, 1, 1])


def test_requests_without_an_entry_are_lost() -> None:
    accounts = Accounts(sent=Counter(stream=5, session=2))
    accounts.ends.update({("stream", End.ANSWERED): 3, ("stream", End.LOST): 1, ("session", End.GIVEN_UP): 2})
    assert (accounts.lost, accounts.is_balanced) == (2, False)
    accounts.ends["stream", End.ANSWERED] = 5
    accounts.ends["stream", End.LOST] = 0
    assert (accounts.lost, accounts.is_balanced) == (0, True)


EVENT = b'data: {"choices": [{"text": "%s", "finish_reason": %s}]}\n\n'
WHOLE = EVENT % (b"a", b"null") + EVENT % (b"b", b'"length"') + b"data: [DONE]\n\n"


async def ends(kind: str, status: int, content: bytes) -> Accounts:
    """The accounts after a request of a kind that a server answers so."""
    traffic = Traffic(random.Random(0))
    transport = httpx.MockTransport(lambda _: httpx.Response(status, content=content))
    async with httpx.AsyncClient(base_url="http://fleet", transport=transport) as client:
        await traffic.ask(client, kind)
    return traffic.accounts


@pytest.mark.parametrize(
    ("kind", "status", "content", "expected"),
    [
        ("stream", 200, WHOLE, End.ANSWERED),
        ("session", 200, WHOLE, End.ANSWERED),
        ("stream", 200, EVENT % (b"a", b"null"), End.LOST),
        ("stream", 200, b'data: {"error": {"message": "gone"}}\n\n', End.FAILED),
        ("stream", 503, b"", End.REFUSED),
        ("stream", 500, b"", End.FAILED),
        ("stream", 404, b"", End.FAILED),
        ("at once", 200, b'{"choices": [{"text": "a", "finish_reason": "length"}]}', End.ANSWERED),
        ("at once", 400, b"", End.FAILED),
        ("at once", 200, b"no JSON", End.FAILED),
        ("at once", 200, b'{"choices": []}', End.FAILED),
        ("stream", 200, b'data: {"other": 1}\n\n', End.FAILED),
        ("two choices", 200, b'{"choices": [{"finish_reason": "length"}]}', End.FAILED),
        ("given up", 200, WHOLE, End.GIVEN_UP),
        ("given up", 200, b"", End.FAILED),
        ("unknown model", 404, b"", End.REFUSED),
        ("unknown model", 200, b"{}", End.FAILED),
        ("too long", 400, b"", End.REFUSED),
        ("too long", 500, b"", End.FAILED),
    ],
)
async def test_each_request_has_one_end(kind: str, status: int, content: bytes, expected: End) -> None:
    accounts = await ends(kind, status, content)
    assert accounts.sent == {kind: 1}
    assert accounts.ends == {(kind, expected): 1}
    assert accounts.refusals.total() == (expected is End.REFUSED)
    assert accounts.answers == (expected is End.ANSWERED)


async def test_a_broken_connection_loses_its_request() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("gone", request=request)

    traffic = Traffic(random.Random(0))
    async with httpx.AsyncClient(base_url="http://fleet", transport=httpx.MockTransport(refuse)) as client:
        for _ in range(20):
            await traffic.ask_any(client)
    assert (traffic.accounts.sent.total(), traffic.accounts.lost) == (20, 20)


async def test_an_answer_that_differs_from_the_one_before_is_wrong() -> None:
    texts = iter([b"a", b"a", b"b"])

    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=EVENT % (next(texts), b'"length"'))

    rng = random.Random(0)
    traffic = Traffic(rng)
    async with httpx.AsyncClient(base_url="http://fleet", transport=httpx.MockTransport(answer)) as client:
        for expected in (0, 0, 1):
            rng.seed(0)
            await traffic.ask(client, "stream")
            assert traffic.accounts.wrong == expected
    assert not traffic.accounts.is_balanced


async def test_a_request_that_can_be_answered_must_not_be_refused() -> None:
    for kind, status, turned_away in (("stream", 503, 1), ("given up", 503, 1), ("unknown model", 404, 0)):
        accounts = await ends(kind, status, b"")
        assert (accounts.turned_away, accounts.is_balanced) == (turned_away, not turned_away), kind


def replicas(in_flight: list[int], dispatched: list[int] | None = None, **status: str) -> list[dict[str, object]]:
    """What a head lists; `_1="down"` is the status of the second."""
    return [
        {
            "id": f"0.{number}",
            "status": status.get(f"_{number}", "up"),
            "in_flight": load,
            "dispatched": 0 if dispatched is None else dispatched[number],
        }
        for number, load in enumerate(in_flight)
    ]


def even(*looks: list[dict[str, object]]) -> Evenness:
    evenness = Evenness()
    for look in looks:
        evenness.note(look)
    return evenness


def test_evenness_counts_only_busy_replicas() -> None:
    found = even(replicas([3, 1]), replicas([0, 1]), replicas([9, 2, 2], _0="draining"))
    assert found.in_flight == pytest.approx((0.5 + 0.0) / 2)
    assert even(replicas([0, 0])).in_flight == 0


def test_dispatches_count_for_replicas_that_served_all_the_time() -> None:
    first, last = replicas([0] * 4, [5, 0, 7, 0]), replicas([0] * 4, [8, 1, 9, 3])
    assert even(first, last).dispatched == pytest.approx(((9 + 1 + 4 + 9) / 4 - (9 / 4) ** 2) ** 0.5 / (9 / 4))
    gone = replicas([0] * 4, [6, 0, 7, 0], _2="down")
    assert even(first, gone, last).dispatched == pytest.approx(((9 + 1 + 9) / 3 - (7 / 3) ** 2) ** 0.5 / (7 / 3))
    replaced = replicas([0] * 4, [0, 0, 7, 0])
    assert even(first, replaced, last).dispatched == pytest.approx(((1 + 4 + 9) / 3 - 2**2) ** 0.5 / 2)
    assert even().dispatched == 0


def soak_of(descriptors: list[float], counted: float = 0, *left_behind: str) -> Soak:
    soak = Soak(Accounts(), Counter(nothing=len(descriptors)), left_behind=list(left_behind))
    for number, value in enumerate(descriptors):
        held = {("head", "descriptors"): value, ("head", "memory_mib"): 500.0}
        soak.add("nothing", 1.0, even(replicas([3, 1])), counted, Look(number / 60, held, {"head": 1}))
    return soak


@pytest.mark.parametrize(
    ("descriptors", "counted", "left_behind", "exit_code"),
    [
        ([40.0] * 10, 0, [], 0),
        ([40.0 + number for number in range(10)], 0, [], UNSOUND),
        ([40.0] * 10, 1, [], UNSOUND),
        ([40.0] * 10, 0, ["a socket"], UNSOUND),
        pytest.param([40.0, 40.0, 44.0, 36.0, 45.0, 39.0], 0, [], UNCLEAR, id="too short to tell"),
        pytest.param([40.0] * 3, 0, [], UNCLEAR, id="too few samples"),
        ([40.0] * 3, 1, [], UNSOUND),
    ],
)
def test_a_run_is_sound_if_nothing_grows_is_counted_or_is_left(
    descriptors: list[float], counted: float, left_behind: list[str], exit_code: int
) -> None:
    assert soak_of(descriptors, counted, *left_behind).exit_code == exit_code


def test_trends_do_not_span_a_restart_of_the_process() -> None:
    soak = soak_of([float(number) for number in range(8)] + [20.0] * 8)
    for number, each in enumerate(soak.rounds):
        each.look.pids["head"] = 1 if number < 8 else 2  # type: ignore[index]
    assert soak.exit_code == 0
    assert {found.samples for who, _, found in soak.trends() if who == "head"} == {7}


def test_an_accepted_request_without_an_end_at_a_client_is_found() -> None:
    soak = soak_of([40.0] * 10)
    soak.accounts.sent.update({"stream": 5, "given up": 2})
    soak.accounts.ends.update({("stream", End.ANSWERED): 5, ("given up", End.GIVEN_UP): 2})
    soak.accounts.answers = 5
    for accepted, expected in ((4, UNSOUND), (5, 0), (7, 0), (8, UNSOUND)):
        soak.accepted = accepted
        assert soak.exit_code == expected, accepted


def test_files_in_shared_memory_from_before_the_run_do_not_count() -> None:
    soak = soak_of([40.0] * 10)
    soak.shared_before, soak.shared_after = {"a", "b"}, {"a"}
    assert soak.exit_code == 0
    soak.shared_after = {"a", "c"}
    assert soak.exit_code == UNSOUND
    assert "In /dev/shm: 2 before, 2 after the end, 1 of them new." in report(soak)


def test_a_run_whose_requests_were_all_refused_is_not_sound() -> None:
    soak = soak_of([40.0] * 10)
    soak.add("nothing", 1.0, Evenness(), 0, Look(10 / 60, soak.rounds[0].look.held, {"head": 1}))
    assert (soak.exit_code, soak.rounds[-1].in_flight) == (0, 0.0)
    soak.accounts.sent["stream"] = soak.accounts.ends["stream", End.REFUSED] = 100
    assert soak.exit_code == UNSOUND


def test_an_interrupted_run_has_accounts() -> None:
    soak = soak_of([40.0] * 3)
    soak.accounts.sent["stream"] += 1
    assert "| all | 1 | 0 | 0 | 0 | 0 | 0 |" in report(soak)
    assert "Only 3 rounds: too few for trends." in report(soak)


def test_the_report_says_what_grows() -> None:
    text = report(soak_of([40.0 + number for number in range(10)]))
    assert "| head | descriptors | 42.50 | 48.50 | +60.00 | +60.00 to +60.00 | grows |" in text
    assert "| head | memory, MiB | 500.00 | 500.00 | +0.00 | +0.00 to +0.00 | flat |" in text


async def test_tasks_are_counted_as_long_as_they_are_alive() -> None:
    before = count()["tasks"]
    tasks = [asyncio.create_task(asyncio.Event().wait()) for _ in range(5)]
    assert count()["tasks"] == before + 5
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    del task, tasks
    # The turn in which all have ended still has them.
    await asyncio.sleep(0)
    assert count()["tasks"] == before


def test_resources_of_another_process_are_counted(tmp_path: Path) -> None:
    program = "import time; opened = [open('/dev/null') for _ in range(7)]; print('begun', flush=True); time.sleep(60)"
    process = Process("holder", [sys.executable, "-c", program], tmp_path / "log", **COUNTING)
    try:
        wait_for(lambda: process.is_running() and "begun" in process.log.read_text(), "it holds what it opens")
        held = held_by(process.popen.pid)
    finally:
        process.popen.kill()
        process.popen.wait()
    # The standard streams, what was opened, the socket that listens and the connection that asked.
    assert (held["descriptors"] - held["sockets"], held["tasks"], held["threads"]) == (10, 0, 2)
    assert 1 <= held["sockets"] <= 2
    assert 1 < held["memory_mib"] < 500
    assert held["objects"] > 1000


def test_files_in_a_folder_are_counted_at_any_depth(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").touch()
    (tmp_path / "vllm_dist_1").touch()
    assert sorted(entries(tmp_path)) == [f"{tmp_path}/a", f"{tmp_path}/a/b", f"{tmp_path}/a/b/file"]


def test_files_of_this_user_in_shared_memory_are_seen(tmp_path: Path) -> None:
    (tmp_path / "psm_1").touch()
    (tmp_path / "gone").symlink_to("nowhere")
    assert in_shared_memory(tmp_path) == {"psm_1", "gone"}
