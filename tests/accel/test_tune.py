"""`sdx-accel bench --tune`: what it times, what it decides, what it leaves, on a CPU and no clock.

`--tiny` lets the reference play every implementation; here a table of times plays the clock.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sdx_accel.bench import tune
from sdx_accel.bench.tune_cases import CASES, TINY, Case
from sdx_accel.runtime import gathering
from sdx_kernels import registry, target
from sdx_kernels.ops.attention_impls import OPERATOR
from sdx_kernels.target import Target
from sdx_kernels.tuning import measured_order
from sdx_kernels.tuning.measured_file import (
    DTYPES,
    MOST_BYTES,
    MOST_ENTRIES,
    Entry,
    document,
    file_name,
    identity,
    preferences,
)

Cli = Callable[..., Any]
Clock = Callable[..., None]

ROWS = len(TINY) * len(DTYPES)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of the test's own, in a process that has looked at none yet."""
    place = tmp_path / "cache"
    monkeypatch.setenv("SDX_CACHE", str(place))
    monkeypatch.delenv("SDX_TUNING", raising=False)
    monkeypatch.setattr(target, "triton_status", lambda: (True, None))
    next_process(monkeypatch)
    yield place
    # choices of these files must not live on
    registry._select.cache_clear()


def next_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_order, "_found", {})
    registry._select.cache_clear()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Sets what readings give, by (shape, dtype, implementation, scores) or any start of "*"."""

    def script(table: dict[tuple[str, str, str, str], Any]) -> None:
        seen: dict[Any, int] = {}

        def reading(runner: tune.Runner) -> float:
            dtype = str(runner.dtype).removeprefix("torch.")
            is_key = (runner.case.name, dtype, runner.name, runner.scores)
            for key, value in table.items():
                if all(a in ("*", b) for a, b in zip(key, is_key, strict=True)):
                    rounds = value if isinstance(value, list) else [value] * tune.ROUNDS
                    number = seen[is_key] = seen.get(is_key, -1) + 1
                    return float(rounds[number])
            return 1.0

        monkeypatch.setattr(tune, "milliseconds", reading)

    script({})
    return script


def written(folder: Path) -> dict[str, Any]:
    (file,) = folder.glob("*.json")
    values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return values


def changes(folder: Path) -> list[tuple[str, str, str, str]]:
    keys = ("shape", "dtype", "name", "instead")
    return [tuple(entry[key] for key in keys) for entry in written(folder)["entries"]]


def test_a_faster_kernel_is_written_and_used_by_the_next_process(
    cli: Cli, folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock({("tiny-self", "float16", "triton", "*"): 0.5})
    signature = tune._signature(TINY[0], torch.float16, tune.DRY_CARD)
    before = OPERATOR.select(signature)
    done = cli("bench", "--tune", "--tiny")
    assert done.code == 0, done.err
    assert changes(folder) == [("tiny-self", "float16", "triton", "sdpa")]
    (file,) = folder.iterdir()
    (digest,) = re.findall(r"\(digest ([0-9a-f]{12})\)", done.out)
    assert f"written: {file} (digest {digest})" in done.out
    lines = [line for line in done.out.splitlines() if re.match(r"tiny-\w+ +b?float16", line)]
    assert len(lines) == ROWS
    assert lines[0].endswith("sdpa 1.0000, triton 0.5000, triton-short 1.0000: triton instead of "
                             "sdpa, 2.00 ×")  # fmt: skip
    assert all(line.endswith("sdpa stays") for line in lines[1:])
    assert f"1 of {ROWS} rows change the shipped order:\n  tiny-self float16: triton" in done.out
    assert "Programs that start from now on use it" in done.out
    assert "To undo: delete the file. SDX_TUNING=off" in done.out

    # this process has chosen already
    assert OPERATOR.select(signature) == before
    next_process(monkeypatch)
    after = OPERATOR.select(signature)
    assert before is not None
    assert after is not None
    assert (before.name, after.name) == ("sdpa", "triton")
    assert measured_order.measured(tune.DRY_CARD.name, 8, 0).digest == digest


def test_the_identity_is_in_the_file(cli: Cli, folder: Path, clock: Clock) -> None:
    cli("bench", "--tune", "--tiny")
    values = written(folder)
    whose = identity("dry run", (8, 0))
    assert {key: values[key] for key in whose} == whose
    assert whose["torch"] == torch.__version__
    assert [path.name for path in folder.iterdir()] == [file_name(whose)]


@pytest.mark.parametrize(
    ("times", "kept"),
    [
        (0.98, True),
        (0.9701, True),
        (0.97, False),
        ([0.5, 0.5, 0.98], True),
        ([0.98, 0.5, 0.5], True),
        ([0.5, 0.6, 0.97], False),
        (1.5, True),
    ],
    ids=str,
)
def test_three_percent_in_each_round(
    cli: Cli, folder: Path, clock: Clock, times: Any, kept: bool
) -> None:
    clock({("tiny-self", "bfloat16", "triton", "*"): times})
    assert cli("bench", "--tune", "--tiny").code == 0
    assert changes(folder) == (
        [] if kept else [("tiny-self", "bfloat16", "triton", "sdpa")]
    )  # fmt: skip


@pytest.mark.parametrize("slow", ["flat", "peaked"])
def test_an_implementation_counts_with_its_slower_scores(
    cli: Cli, folder: Path, clock: Clock, slow: str
) -> None:
    clock({("*", "*", "triton", slow): 1.1, ("*", "*", "triton", "*"): 0.5})
    done = cli("bench", "--tune", "--tiny")
    assert changes(folder) == []
    assert f"0 of {ROWS} rows change the shipped order:\nwritten" in done.out
    assert "Programs that start from now on" not in done.out
    # and so does torch's
    clock({("*", "*", "sdpa", slow): 2.0})
    cli("bench", "--tune", "--tiny")
    assert len(changes(folder)) == ROWS


def test_the_fastest_of_several_is_taken(cli: Cli, folder: Path, clock: Clock) -> None:
    clock({("*", "*", "triton", "*"): [0.5, 0.5, 0.9], ("*", "*", "triton-short", "*"): 0.6})
    cli("bench", "--tune", "--tiny")
    assert {name for _, _, name, _ in changes(folder)} == {"triton"}


def test_the_medians_of_both_are_in_the_file(cli: Cli, folder: Path, clock: Clock) -> None:
    clock({("*", "*", "triton", "*"): [0.5, 0.25, 0.75], ("*", "*", "sdpa", "*"): [2.0, 4.0, 3.0]})
    cli("bench", "--tune", "--tiny")
    entry = written(folder)["entries"][0]
    assert (entry["ms"], entry["instead_ms"]) == (0.5, 3.0)
    assert entry["head_dims"] == [16, 16]
    assert (entry["queries"], entry["keys"]) == ([33, 128], [33, 128])


def test_it_is_measured_against_the_shipped_order_not_an_earlier_tuning(
    cli: Cli, folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock({("*", "*", "triton", "*"): 0.5})
    cli("bench", "--tune", "--tiny")
    assert len(changes(folder)) == ROWS
    next_process(monkeypatch)
    clock({("*", "*", "triton", "*"): 1.5})
    done = cli("bench", "--tune", "--tiny")
    assert changes(folder) == []
    assert "triton stays" not in done.out


def test_a_wrong_result_is_not_used(
    cli: Cli, folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock({("*", "*", "triton", "*"): 0.5})
    real = tune._steps

    def wrong(name: str, sets: Any) -> Any:
        steps = real(name, sets)
        if name != "triton":
            return steps
        return tuple(lambda step=step: step() + 0.1 for step in steps)

    monkeypatch.setattr(tune, "_steps", wrong)
    done = cli("bench", "--tune", "--tiny")
    assert done.code == 0, done.err
    assert changes(folder) == []
    assert done.out.count("triton is wrong and not used") == ROWS


@pytest.mark.parametrize("number", [0, 1])
def test_a_kernel_that_fails_is_not_used_and_stops_nothing(
    cli: Cli, folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    clock({("*", "*", "triton-short", "*"): 0.5})
    scripted, calls = tune.milliseconds, {"triton": 0}

    def fail(runner: tune.Runner) -> float:
        if runner.name == "triton":
            calls["triton"] += 1
            if calls["triton"] > 2 * number:
                raise ValueError("no such instruction")
        return scripted(runner)

    monkeypatch.setattr(tune, "milliseconds", fail)
    done = cli("bench", "--tune", "--tiny")
    assert done.code == 0, done.err
    assert done.out.count("triton fails and is not used (ValueError)") == ROWS
    assert {name for _, _, name, _ in changes(folder)} == {"triton-short"}


def test_torchs_kernel_that_fails_changes_nothing(
    cli: Cli, folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(runner: tune.Runner) -> float:
        if runner.name == "sdpa":
            raise RuntimeError("no kernel image")
        return 0.5

    monkeypatch.setattr(tune, "milliseconds", fail)
    assert cli("bench", "--tune", "--tiny").code == 0
    assert changes(folder) == []


def test_a_shape_that_does_not_fit_is_left_out(
    cli: Cli, folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tune._inputs

    def full(case: Case, *rest: Any) -> Any:
        if case.name == "tiny-self":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(case, *rest)

    clock({("*", "*", "triton", "*"): 0.5})
    monkeypatch.setattr(tune, "_inputs", full)
    done = cli("bench", "--tune", "--tiny")
    assert done.out.count("does not fit beside what is on the card: sdpa stays") == 2
    assert {shape for shape, *_ in changes(folder)} == {"tiny-cross"}


def test_after_the_limit_no_shape_is_begun(
    cli: Cli, folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "LIMIT_SECONDS", -1.0)
    done = cli("bench", "--tune", "--tiny")
    assert done.code == 0, done.err
    assert "0 of 0 rows" in done.out
    assert "the shipped order is kept there: tiny-self float16, tiny-cross float16," in done.out


def test_the_real_clock_runs_on_a_cpu(cli: Cli, folder: Path) -> None:
    done = cli("bench", "--tune", "--tiny")
    assert done.code == 0, done.err
    assert "not used" not in done.out
    assert written(folder)["card"] == "dry run"


def test_a_switched_off_order_is_said_to_be(
    cli: Cli, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock({("*", "*", "triton", "*"): 0.5})
    monkeypatch.setenv("SDX_TUNING", "off")
    done = cli("bench", "--tune", "--tiny")
    assert "SDX_TUNING=off is set: nothing uses it" in done.out
    assert "Programs that start from now on" not in done.out


# refusals


def refused(cli: Cli, *flags: str) -> str:
    done = cli("bench", "--tune", *flags)
    assert (done.code, done.out) == (2, "")
    return str(done.err)


def test_without_a_gpu_it_is_refused(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (line,) = refused(cli).splitlines()
    assert "sees none here: `sdx-accel doctor` says why; `sdx-accel bench --tune --tiny`" in line
    assert not folder.exists()


@pytest.mark.parametrize(
    "card", [Target("cuda", (7, 5), 0, "Tesla T4"), Target("rocm", None, 0, "Radeon")]
)
def test_where_torchs_kernels_always_run_there_is_nothing_to_measure(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, card: Target
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(target, "of", lambda device: card)
    assert f"on {card.name} torch's kernels always run" in refused(cli)


def test_without_triton_there_is_nothing_to_measure(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(target, "of", lambda device: Target("cuda", (8, 6), 0, "RTX 3060"))
    monkeypatch.setattr(target, "triton_status", lambda: (False, "Triton cannot be imported here"))
    assert "Triton cannot be imported here: torch's kernels always run" in refused(cli)


@pytest.mark.parametrize("what", ["steps", "pictures", "attention"])
def test_it_stands_alone(cli: Cli, what: str) -> None:
    assert "--tune stands alone" in refused(cli, what)
    assert "--tune stands alone" in refused(cli, "--tiny", what)


def test_without_a_place_for_the_file_nothing_is_timed(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "milliseconds", None)
    folder.write_text("a file where the folder should be")
    assert f"{folder} is not writable" in refused(cli, "--tiny")
    monkeypatch.setattr(tune, "cache_folder", lambda: None)
    assert "SDX_CACHE=FOLDER says where to write" in refused(cli, "--tiny")


def test_a_file_that_cannot_be_written_at_the_end_is_a_failure(
    cli: Cli, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "write_values", lambda *arguments: False)
    done = cli("bench", "--tune", "--tiny")
    assert done.code == 1
    assert "could not be written: the order is as it was" in done.err


# the shapes


@pytest.mark.parametrize("cases", [CASES, TINY], ids=["real", "tiny"])
def test_each_shape_lies_within_its_bounds_and_no_two_overlap(cases: tuple[Case, ...]) -> None:
    for number, case in enumerate(cases):
        assert case.for_queries[0] <= case.queries <= case.for_queries[1]
        assert case.for_keys[0] <= case.keys <= case.for_keys[1]
        for other in cases[:number]:
            apart = (
                case.head_dim != other.head_dim
                or case.for_queries[1] < other.for_queries[0]
                or other.for_queries[1] < case.for_queries[0]
                or case.for_keys[1] < other.for_keys[0]
                or other.for_keys[1] < case.for_keys[0]
            )
            assert apart, (case.name, other.name)
    assert len({case.name for case in cases}) == len(cases)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_on_every_card_there_is_something_to_choose_between(
    capability: tuple[int, int],
) -> None:
    card = Target("cuda", capability, 101376, "a card", 28)
    for dtype in DTYPES.values():
        for case in CASES:
            names = tune._contenders(tune._signature(case, dtype, card))
            assert tune._present(tune._signature(case, dtype, card)) in names
            assert len(names) >= 2
            assert names[0] == "sdpa"
            assert ("triton-wide" in names) == (case.head_dim > 256)


def test_a_file_of_all_rows_can_be_read() -> None:
    whose = identity("NVIDIA GeForce RTX 4070 Ti SUPER Laptop GPU", (8, 9))
    entries = [
        Entry(
            case.name, dtype, (case.head_dim,) * 2, case.for_queries, case.for_keys,
            "triton-short", 1234.567891, "triton-wide", 1234.567891,
        )
        for dtype in DTYPES
        for case in CASES
    ]  # fmt: skip
    data = json.dumps(document(whose, entries), indent=1, sort_keys=True).encode()
    assert len(preferences(data, whose)) == len(entries) <= MOST_ENTRIES // 2
    assert len(data) < MOST_BYTES // 2


@pytest.mark.gpu
def test_a_card_is_timed_and_named_as_its_driver_names_it(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = target.of(torch.device("cuda"))
    monkeypatch.setattr(tune, "CASES", (CASES[1], CASES[3]))
    done = cli("bench", "--tune")
    assert done.code == 0, done.err
    assert "not used" not in done.out
    assert written(folder)["card"] == card.name
    # a kernel of a microsecond or of a second is a clock that is not understood
    times = [float(time) for time in re.findall(r"(?:sdpa|triton\S*) ([0-9.]+)", done.out)]
    assert len(times) >= 8
    assert all(0.001 < time < 50 for time in times)
    # doctor looks its order up by the name that NVML gives
    assert card.name in {gpu.name for gpu in gathering.gather().gpus}
