"""`sdx-accel bench --tune`: times attention on this card, and leaves a file that selection reads.

Torch's choice and each kernel of ours that takes a shape, in fp16 and bf16, on flat and on peaked
scores: an implementation counts with its slower one. One comes before the shipped choice where it
is at least 3 % faster in each of three rounds and its result holds the tolerance. Times are those
of a CUDA graph's replay, so that the host's launches are not in them.

It knows how to time and to decide; `sdx_kernels.tuning.measured_file` knows the file.
"""

import functools
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sdx_accel.bench.tune_cases import CASES, TINY, Case
from sdx_accel.errors import RefusedError, WorkError
from sdx_accel.runtime.kernel_cache import ensure_kernel_cache
from sdx_accel.runtime.user_cache import write_values
from sdx_kernels import target
from sdx_kernels.checks import AttentionInputs, Signature, attention_inputs
from sdx_kernels.ops.attention_impls import OPERATOR
from sdx_kernels.target import Target
from sdx_kernels.testing import assert_close, math_peer, reference64
from sdx_kernels.tuning.attention_order import preference
from sdx_kernels.tuning.cache_folder import cache_folder
from sdx_kernels.tuning.measured_file import (
    DTYPES,
    NAMES,
    Entry,
    digest_of,
    document,
    file_name,
    identity,
    preferences,
    read,
)
from sdx_kernels.tuning.measured_order import switched_off

__all__ = ["LEAST_GAIN", "ROUNDS", "Runner", "milliseconds", "preferred", "run"]

#: of the present choice's time; less is within what a card's clock drifts
LEAST_GAIN = 0.03
ROUNDS = 3
#: what queries are multiplied by: where an optimistic softmax has to start again, it does at 6
SCORES = {"flat": 1.0, "peaked": 6.0}
#: no more shapes are begun after so many seconds; the last one takes at most some more
LIMIT_SECONDS = 80.0
#: one reading; a shape has some 30 of them
READING_MS = 15.0
SAMPLES = (3, 20)
#: no operand is found in the L2 cache: bytes between two uses of one, where the card has less L2
ROTATED_BYTES = 64 << 20
MOST_SETS = 16
#: the dry run pretends to have it; no card has this name, so what it leaves is never read
DRY_CARD = Target("cuda", (8, 0), 166912, "dry run", 108)

_SHIPPED = replace(OPERATOR, prefer=preference)


Step = Callable[[], torch.Tensor]


@dataclass
class Runner:
    """One implementation on one shape and one kind of scores.

    Attributes:
        name: the implementation. scores: a key of `SCORES`.
        steps: its calls, one for each set of inputs.
        graph: of all of them, once it is recorded. kept: what it writes.
        samples: replays of one reading.
    """

    case: Case
    dtype: torch.dtype
    name: str
    scores: str
    steps: tuple[Step, ...]
    device: torch.device
    graph: Any = None
    kept: Any = None
    samples: int = SAMPLES[0]


def run(*, tiny: bool = False) -> None:
    """Time this card and write its order; prints a row for each shape.

    Args:
        tiny: a dry run on the CPU: two small shapes, every implementation played by the reference.

    Raises:
        RefusedError: there is nothing to time here, or no place for the result.
        WorkError: the result could not be written.
    """
    began = time.monotonic()
    card = DRY_CARD if tiny else _card()
    folder = _writable_folder()
    device = torch.device("cpu" if tiny else "cuda")
    if not tiny:
        ensure_kernel_cache()
        # a graph's recording may collect garbage first: 50 ms of looking at torch's own objects
        gc.collect()
        gc.freeze()
    whose = identity(card.name, card.capability or (0, 0))
    print(
        f"{card.name}, torch {whose['torch']}, triton {whose['triton'] or 'none'}: ms on the "
        f"slower of flat and peaked scores, {ROUNDS} rounds. A kernel is compiled at its first use."
    )
    entries, rows, left = [], 0, []
    for name in DTYPES:
        for case in TINY if tiny else CASES:
            if time.monotonic() - began > LIMIT_SECONDS:
                left.append(f"{case.name} {name}")
                continue
            entry = _row(case, name, card, device)
            rows += 1
            if entry is not None:
                entries.append(entry)
    _finish(folder, whose, entries, rows)
    if left:
        print(
            f"not reached within {LIMIT_SECONDS:.0f} s, the shipped order is kept there: "
            f"{', '.join(left)}. Run it again: what has been compiled stays compiled."
        )


def _card() -> Target:
    if not torch.cuda.is_available():
        raise RefusedError(
            f"bench --tune times an NVIDIA GPU, and torch {torch.__version__} sees none here: "
            "`sdx-accel doctor` says why; `sdx-accel bench --tune --tiny` is a dry run on the CPU"
        )
    card = target.of(torch.device("cuda"))
    if card.kind != "cuda" or card.capability is None or card.capability < (8, 0):
        raise RefusedError(
            f"on {card.name} torch's kernels always run, there is no order to measure: ours are "
            "for NVIDIA cards of capability 8.0 or newer"
        )
    works, reason = target.triton_status()
    if not works:
        raise RefusedError(f"{reason}: torch's kernels always run, there is no order to measure")
    return card


def _writable_folder() -> Path:
    folder = cache_folder()
    if folder is None:
        raise RefusedError("this user has no home folder: SDX_CACHE=FOLDER says where to write")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RefusedError(
            f"{folder} is not writable ({error.strerror}): SDX_CACHE=FOLDER names another one"
        ) from None
    return folder


def _row(case: Case, dtype: str, card: Target, device: torch.device) -> Entry | None:
    """Time one shape, print it; the entry that it gives, None where the shipped order stays."""
    signature = _signature(case, DTYPES[dtype], card)
    present = _present(signature)
    names = _contenders(signature)
    title = f"{case.name:<20}{dtype:<10}"
    if len(names) < 2 or present not in names:
        print(f"{title}{', '.join(names) or 'nothing'} alone", flush=True)
        return None
    notes: dict[str, str] = {}
    try:
        times = _times(case, DTYPES[dtype], names, device, notes)
    except torch.OutOfMemoryError:
        print(f"{title}does not fit beside what is on the card: {present} stays", flush=True)
        return None
    shown = [f"{name} {statistics.median(rounds):.4f}" for name, rounds in times.items()]
    shown += [f"{name} {note}" for name, note in notes.items()]
    best = preferred(times, present) if present in times else present
    text = f"{title}{', '.join(shown)}"
    if best == present:
        print(f"{text}: {present} stays", flush=True)
        return None
    ms, instead_ms = statistics.median(times[best]), statistics.median(times[present])
    print(f"{text}: {best} instead of {present}, {instead_ms / ms:.2f} ×", flush=True)
    return Entry(
        shape=case.name,
        dtype=dtype,
        head_dims=(case.head_dim, case.head_dim),
        queries=case.for_queries,
        keys=case.for_keys,
        name=best,
        ms=round(ms, 6),
        instead=present,
        instead_ms=round(instead_ms, 6),
    )


def preferred(times: Mapping[str, Sequence[float]], present: str) -> str:
    """Who comes first: the fastest of those that beat the present one in each round, or that one.

    Args:
        times: by implementation, one figure a round: the slower of its scores.
        present: the one that the shipped order picks.
    """
    clear = [
        name
        for name, rounds in times.items()
        if name != present
        and all(
            ours <= theirs * (1 - LEAST_GAIN)
            for ours, theirs in zip(rounds, times[present], strict=True)
        )
    ]
    return min(clear, key=lambda name: statistics.median(times[name]), default=present)


def _signature(case: Case, dtype: torch.dtype, card: Target) -> Signature:
    return Signature(
        target=card,
        dtype=dtype,
        output_dtype=dtype,
        batch=case.batch,
        queries=case.queries,
        keys=case.keys,
        heads=case.heads,
        key_heads=case.heads,
        head_dim=case.head_dim,
        value_dim=case.head_dim,
    )


def _present(signature: Signature) -> str:
    """What the shipped order picks, whatever an earlier tuning says."""
    choice = _SHIPPED.select(signature)
    return "" if choice is None else choice.name


def _contenders(signature: Signature) -> list[str]:
    names = [name for name in NAMES if not OPERATOR.get(name).reasons(signature)]
    # the wide kernel is for what is too wide for the portable one, and slower everywhere else
    return [name for name in names if name != "triton-wide" or "triton" not in names]


def _times(
    case: Case, dtype: torch.dtype, names: list[str], device: torch.device, notes: dict[str, str]
) -> dict[str, list[float]]:
    """By implementation, milliseconds of each round; one that fails or errs gets a note instead."""
    sets = {scores: _inputs(case, dtype, device, factor) for scores, factor in SCORES.items()}
    runners = {
        name: [
            Runner(case, dtype, name, scores, _steps(name, inputs), device)
            for scores, inputs in sets.items()
        ]
        for name in names
    }
    times: dict[str, list[float]] = {name: [] for name in names}
    with torch.no_grad():
        # in turns, so that a clock that drifts drifts for all of them
        for number in range(ROUNDS):
            for name in list(times):
                try:
                    if number == 0:
                        _check(runners[name][0].steps[0](), sets["flat"][0])
                    times[name].append(max(milliseconds(runner) for runner in runners[name]))
                except AssertionError:
                    notes[name] = "is wrong and not used"
                    del times[name]
                except Exception as error:
                    # a compiler's or driver's complaint about one must not end the others' run
                    notes[name] = f"fails and is not used ({type(error).__name__})"
                    del times[name]
    return times


def _inputs(
    case: Case, dtype: torch.dtype, device: torch.device, factor: float
) -> list[AttentionInputs]:
    """Sets of inputs, far enough apart that none is found in the L2 cache at its next use."""
    size = case.batch * 2 * (case.queries + case.keys) * case.heads * case.head_dim * dtype.itemsize
    between = ROTATED_BYTES
    if device.type == "cuda":
        between = max(between, torch.cuda.get_device_properties(device).L2_cache_size)
    count = 1 if device.type == "cpu" else min(MOST_SETS, -(-between // size))
    generator = torch.Generator(device).manual_seed(0)
    sets = []
    for _ in range(count):
        query, key, value = (
            torch.randn(
                (case.batch, length, case.heads, case.head_dim),
                generator=generator,
                device=device,
                dtype=dtype,
            )
            for length in (case.queries, case.keys, case.keys)
        )
        sets.append(attention_inputs(query * factor, key, value))
    return sets


def _steps(name: str, sets: list[AttentionInputs]) -> tuple[Step, ...]:
    # the dry run has no card: the reference plays them all
    impl = OPERATOR.get(name if sets[0].query.is_cuda else "reference")

    def call(inputs: AttentionInputs) -> torch.Tensor:
        out: torch.Tensor = impl.run(inputs)[0]
        return out

    return tuple(functools.partial(call, inputs) for inputs in sets)


def _check(result: torch.Tensor, inputs: AttentionInputs) -> None:
    """Hold some rows of a result to the tolerance.

    Raises:
        AssertionError: it is outside.
    """
    some = slice(0, 2)
    rows = slice(0, None, max(1, inputs.query.shape[1] // 64))
    q, k, v = inputs.query[some, rows], inputs.key[some], inputs.value[some]
    assert_close(result[some, rows], reference64(q, k, v), peer=math_peer(q, k, v))


def milliseconds(runner: Runner) -> float:
    """One reading: the median over replays, for one call."""
    if runner.device.type != "cuda":
        times = []
        for _ in range(SAMPLES[0]):
            start = time.perf_counter()
            for step in runner.steps:
                step()
            times.append((time.perf_counter() - start) * 1e3)
        return statistics.median(times) / len(runner.steps)
    if runner.graph is None:
        _record(runner)
    return statistics.median(_replays(runner, runner.samples)) / len(runner.steps)


def _record(runner: Runner) -> None:
    for step in runner.steps:
        step()
    torch.cuda.synchronize(runner.device)
    runner.graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(runner.graph):
        # what a graph writes has to stay where it was
        runner.kept = [step() for step in runner.steps]
    # the first replay brings the graph to the card
    once = _replays(runner, 2)[-1]
    runner.samples = max(SAMPLES[0], min(SAMPLES[1], int(READING_MS / max(once, 1e-3))))


def _replays(runner: Runner, samples: int) -> list[float]:
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(samples)
    ]
    for start, end in events:
        # a busy card hides the host's launch of the graph
        torch.cuda._sleep(200_000)
        start.record()
        runner.graph.replay()
        end.record()
    torch.cuda.synchronize(runner.device)
    return [start.elapsed_time(end) for start, end in events]


def _finish(folder: Path, whose: Mapping[str, Any], entries: list[Entry], rows: int) -> None:
    """Write the file, read it back as selection will, and say what it changes."""
    name = file_name(whose)
    if not write_values(folder, name, document(whose, entries)):
        raise WorkError(f"{folder / name} could not be written: the order is as it was")
    data = read(folder / name)
    preferences(data, whose)
    print(f"\n{len(entries)} of {rows} rows change the shipped order:")
    for entry in entries:
        print(
            f"  {entry.shape} {entry.dtype}: {entry.name} instead of {entry.instead}, "
            f"{entry.instead_ms / entry.ms:.2f} ×"
        )
    print(f"written: {folder / name} (digest {digest_of(data)})")
    if switched_off():
        print("SDX_TUNING=off is set: nothing uses it until that is unset.")
    elif entries:
        print(
            "Programs that start from now on use it, on this card and with these versions; a seed "
            "may give other last bits than before. doctor and xattn_report() show its digest."
        )
    print("To undo: delete the file. SDX_TUNING=off does without it for one run.")
