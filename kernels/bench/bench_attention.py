"""Times attention, forward and backward, on the shapes that pictures really launch.

Everyone gets the same inputs, warm-up and number of samples; inputs are rotated so that no run
finds its operands in the L2 cache; losses are printed as readily as wins. A result that breaks the
tolerance has no speed.

    python kernels/bench/bench_attention.py --seconds 500 --jobs 12 --json attention.json
    python kernels/bench/bench_attention.py --tiny          # a dry run, on the CPU too
    python kernels/bench/bench_attention.py --interpret     # the same through our kernels, slowly
"""

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sdx_kernels import KernelError, LowerTriangularMask, choose, target
from sdx_kernels.testing import (
    REAL_SHAPES,
    assert_close,
    largest_error,
    math_peer,
    random_inputs,
    reference64,
)

# a script's folder is on the path, a module's that a test loads is not
sys.path.insert(0, str(Path(__file__).parent))
from bench_contenders import (
    Card,
    Contender,
    Shape,
    Step,
    backward_contenders,
    forward_contenders,
)

TINY: tuple[Shape, ...] = (
    ("tiny-self", 1, 64, 64, 2, 16, False),
    ("tiny-causal", 1, 33, 33, 2, 16, True),
)
#: DESIGN's shapes come with the real ones; this one is only a yardstick for head dim 128
SHAPES: tuple[Shape, ...] = (*REAL_SHAPES, ("dit-4608", 1, 4608, 4608, 24, 128, False))

#: what q is multiplied by; "sink" adds a key in the middle that draws most of every row
SCORES = {"flat": 1.0, "x3": 3.0, "x6": 6.0, "sink": 1.0}
PEAKED = ("sdxl-1024-self-64", "sdxl-1024-self-32", "sdxl-2048-self-128", "dit-4608")
BACKWARD = (
    "sdxl-1024-self-64", "sdxl-1024-self-32", "sd15-512-self-64", "sd15-512-self-32", "dit-4608",
    "vae-1024-middle",
)  # fmt: skip
LAST = ("sdxl-2048-self-128", "vae-1024-middle", "animatediff-temporal")


@dataclass(frozen=True)
class Row:
    """One measurement; times in milliseconds, memory in MiB beside inputs."""

    shape: str
    dtype: str
    direction: str
    scores: str
    implementation: str
    kind: str
    ran: str
    median_ms: float | None = None
    p10_ms: float | None = None
    p90_ms: float | None = None
    graph_ms: float | None = None
    host_us: float | None = None
    tflops: float | None = None
    peak_mib: float | None = None
    redone: float | None = None
    error: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Cell:
    """One table of contenders: what they all compute."""

    shape: Shape
    dtype: torch.dtype
    direction: str
    scores: str

    @property
    def flops(self) -> float:
        """Operations of the products, as everybody counts them."""
        _, batch, queries, keys, heads, dim, causal = self.shape
        once = batch * heads * queries * keys * dim / (2 if causal else 1)
        return once * (4 if self.direction == "forward" else 10)

    def contenders(self, card: Card, missing: list[str]) -> list[Contender]:
        """Everyone who may take part."""
        find = forward_contenders if self.direction == "forward" else backward_contenders
        return find(self.shape, self.dtype, card, missing)


def samples_ms(
    call: Callable[[int], object],
    device: torch.device,
    *,
    warm_up: int = 10,
    samples: int = 50,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Milliseconds of `samples` calls after `warm_up` others; call gets the sample's number.

    On a GPU events bracket each call on its stream; elsewhere the clock does.
    """
    for index in range(warm_up):
        call(index)
    if device.type != "cuda":
        times = []
        for index in range(samples):
            start = clock()
            call(index)
            times.append((clock() - start) * 1e3)
        return times
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(samples)
    ]
    torch.cuda.synchronize(device)
    for index, (start_event, end_event) in enumerate(events):
        # a busy GPU hides the host's launch time, which a short kernel would otherwise measure:
        # 0.5 ms, more than any launch here takes
        torch.cuda._sleep(1_000_000)
        start_event.record()
        call(index)
        end_event.record()
    torch.cuda.synchronize(device)
    return [start_event.elapsed_time(end_event) for start_event, end_event in events]


def inputs_of(cell: Cell, device: torch.device) -> list[tuple[torch.Tensor, ...]]:
    """Sets of (q, k, v, gradient), at least 64 MiB from one use of an operand to the next."""
    _, batch, queries, keys, heads, dim, _ = cell.shape
    size = batch * (2 * queries + 2 * keys) * heads * dim * cell.dtype.itemsize
    sets = []
    for seed in range(max(2, min(16, 1 + (64 << 20) // max(1, size)))):
        q, k, v = random_inputs(
            batch, queries, keys, heads, dim, dtype=cell.dtype, device=device, seed=seed
        )
        if cell.scores == "sink":
            # about 28 octaves above the other keys, and in no first block
            q = q + 1.0
            k[:, keys // 2] = 20.0 / math.sqrt(dim)
        q = q * SCORES[cell.scores]
        generator = torch.Generator().manual_seed(seed + 1000)
        grad = torch.randn(q.shape, generator=generator).to(device, cell.dtype)
        sets.append((q, k, v, grad))
    return sets


def largest_gap(cell: Cell, inputs: tuple[torch.Tensor, ...], result: Any) -> float:
    """The result's error against fp64 on the same inputs; raises where it breaks the tolerance."""
    q, k, v, grad = inputs
    causal = LowerTriangularMask() if cell.shape[6] else None
    limit = None if cell.scores == "flat" else math.inf
    if cell.direction == "forward":
        queries = q.shape[1]
        rows = slice(0, None, 1 if cell.shape[6] else max(1, queries // 64))
        some = min(8, q.shape[0])
        q, k, v, out = q[:some, rows], k[:some], v[:some], result[:some, rows]
        truth = reference64(q, k, v, causal)
        assert_close(out, truth, peer=math_peer(q, k, v, causal), limit=limit)
        return largest_error(out, truth)
    # one item's first two heads are as good as all: heads know nothing of each other
    part = (slice(0, 1), slice(None), slice(0, 2))
    found = [tensor[part] for tensor in result]

    def gradients(attention: Callable[..., torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [tensor[part].to(dtype).detach().requires_grad_() for tensor in (q, k, v)]
        with torch.enable_grad():
            out = attention(*leaves)
        return list(torch.autograd.grad(out, leaves, grad[part].to(dtype)))

    truths = gradients(reference64, torch.float64)
    peers = gradients(math_peer, cell.dtype)
    for ours, truth, peer in zip(found, truths, peers, strict=True):
        assert_close(ours, truth, peer=peer, factor=3.0, limit=math.inf)
    return max(largest_error(a, b) for a, b in zip(found, truths, strict=True))


def graph_ms(steps: list[Step], device: torch.device) -> float | None:
    """Milliseconds a call within a replayed graph of one call a set of inputs."""
    graph = torch.cuda.CUDAGraph()
    kept = []
    try:
        with torch.cuda.graph(graph):
            kept = [step() for step in steps]
    except RuntimeError:
        return None
    times = samples_ms(lambda _: graph.replay(), device, warm_up=3, samples=20)
    del kept
    return statistics.median(times) / len(steps)


def measure(
    cell: Cell,
    contender: Contender,
    sets: list[tuple[torch.Tensor, ...]],
    device: torch.device,
    samples: int,
) -> Row:
    """One contender on one cell; a refusal or a wrong result becomes the row's note."""
    short = str(cell.dtype).removeprefix("torch.")
    head = (cell.shape[0], short, cell.direction, cell.scores, contender.name, contender.kind)
    ran = contender.name
    inputs = [tuple(t.clone() for t in one) for one in sets] if contender.private else sets
    on_gpu = device.type == "cuda"
    try:
        if contender.name in ("automatic", "triton") or contender.name.startswith("sdpa"):
            op = None if contender.name == "automatic" else contender.name
            ran = choose(*sets[0][:3], LowerTriangularMask() if cell.shape[6] else None, op=op).name
        with torch.no_grad():
            steps = [contender.start(*one) for one in inputs]
            if on_gpu:
                torch.cuda.synchronize(device)
                torch.cuda.reset_peak_memory_stats(device)
                before = torch.cuda.memory_allocated(device)
            result = steps[0]()
            peak = (torch.cuda.max_memory_allocated(device) - before) / 2**20 if on_gpu else None
            error = largest_gap(cell, sets[0], result)
            del result
            times = samples_ms(lambda i: steps[i % len(steps)](), device, samples=samples)
            host = None
            if on_gpu:
                began = time.perf_counter()
                for index in range(10):
                    steps[index % len(steps)]()
                host = (time.perf_counter() - began) * 1e5
                torch.cuda.synchronize(device)
            replayed = graph_ms(steps, device) if on_gpu and cell.direction == "forward" else None
            redone = contender.redo(*sets[0][:3]) if contender.redo else None
    except AssertionError as wrong:
        return Row(*head, ran, note=f"WRONG, no speed: {str(wrong).splitlines()[0]}")
    except KernelError:
        return Row(*head, "", note="refused")
    except Exception as error:
        # a compiler's or driver's complaint about one candidate must not end the others' run
        text = (str(error) or repr(error)).splitlines()[0]
        return Row(*head, "", note=f"{type(error).__name__}: {text[:120]}")
    median = statistics.median(times)
    deciles = statistics.quantiles(times, n=10)
    return Row(
        *head,
        ran,
        round(median, 5),
        round(deciles[0], 5),
        round(deciles[-1], 5),
        None if replayed is None else round(replayed, 5),
        None if host is None else round(host, 1),
        round(cell.flops / median / 1e9, 2),
        None if peak is None else round(peak, 2),
        None if redone is None else round(redone, 4),
        error,
    )


def machine(device: torch.device) -> dict[str, object]:
    """What a figure is worth nothing without."""
    facts = target.of(device)
    triton = sys.modules.get("triton")
    return {
        "device": facts.name if device.type == "cuda" else platform.processor() or "cpu",
        "capability": facts.capability,
        "torch": torch.__version__,
        "triton": getattr(triton, "__version__", None),
        "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,
    }


def _best(row: Row) -> float:
    """What a contender is ranked by: a graph's replay where there is one."""
    time_ms = row.graph_ms if row.graph_ms is not None else row.median_ms
    return math.inf if time_ms is None else time_ms


def table(rows: list[Row]) -> str:
    """The rows as text, cell by cell, and who wins each: as shipped, and with candidates."""
    lines, verdicts = [], []
    cells: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        cells.setdefault((row.shape, row.dtype, row.direction, row.scores), []).append(row)
    for cell, members in cells.items():
        lines.append(f"{' '.join(cell)}:  ms eager (p10–p90), graph, TFLOP/s, host µs, MiB, redone")
        for row in sorted(members, key=_best):
            name = f"  {row.implementation:<30} {row.kind:<8}"
            if row.median_ms is None:
                lines.append(f"{name}{row.note}")
                continue
            ran = "" if row.ran == row.implementation else f" → {row.ran}"
            others = " ".join(
                "–" if value is None else f"{value:g}"
                for value in (row.graph_ms, row.tflops, row.host_us, row.peak_mib, row.redone)
            )
            span = f"{row.median_ms:.4f} ({row.p10_ms:.4f}–{row.p90_ms:.4f})"
            lines.append(f"{name}{span:<28} {others}{ran}")
        ours = [row for row in members if row.implementation not in ("automatic", "sdpa")]
        winners = {
            kind: min((row for row in ours if row.kind == kind), key=_best, default=None)
            for kind in ("peer", "shipped", "tune")
        }
        peer = winners["peer"]
        text = []
        for kind, row in winners.items():
            if row is not None and _best(row) < math.inf:
                ratio = f" {_best(peer) / _best(row):.2f}x" if peer and kind != "peer" else ""
                text.append(f"{kind} {row.implementation} {_best(row):.4f}{ratio}")
        verdicts.append(f"{' '.join(cell):<48} " + " | ".join(text))
    return "\n".join(
        [*lines, "", "fastest of each kind, ms, and times the fastest peer:", *verdicts]
    )


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """What is to be measured, in the order in which it matters and costs."""
    if options.tiny:
        dtypes = [torch.float16 if options.interpret else torch.float32]
        shapes: tuple[Shape, ...] = TINY
    else:
        names = options.dtype.split(",")
        dtypes, shapes = [getattr(torch, name) for name in names], SHAPES

    def found() -> Iterator[Cell]:
        for dtype in dtypes:
            for shape in shapes:
                if options.only not in shape[0]:
                    continue
                yield Cell(shape, dtype, "forward", "flat")
                if shape[0] in PEAKED:
                    yield from (Cell(shape, dtype, "forward", s) for s in ("x3", "x6", "sink"))
                if shape[0] in BACKWARD or options.interpret:
                    yield Cell(shape, dtype, "backward", "flat")

    def late(cell: Cell) -> tuple[bool, bool, bool]:
        return cell.shape[0] in LAST, cell.scores != "flat", cell.direction == "backward"

    wanted = options.direction
    return sorted((c for c in found() if wanted in ("both", c.direction)), key=late)


def compile_all(arguments: list[str], jobs: int, limit: float) -> None:
    """Fills Triton's cache from `jobs` processes at once; a candidate compiles for 3 to 20 s."""
    commands = [
        [sys.executable, __file__, *arguments, "--compile-only", f"{index}/{jobs}"]
        for index in range(jobs)
    ]
    workers = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for command in commands]
    deadline = time.monotonic() + limit
    for worker in workers:
        try:
            worker.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


def launch_each_once(
    cells: list[Cell], card: Card, device: torch.device, index: int, jobs: int
) -> None:
    """Launches every jobs-th contender once, on a few queries, and ignores what it says."""
    number = 0
    for cell in cells:
        if cell.scores != "flat":
            continue
        name, batch, queries, keys, heads, dim, causal = cell.shape
        few = Cell(
            (name, batch, min(queries, 256), min(keys, 2048), heads, dim, causal),
            cell.dtype, cell.direction, cell.scores,
        )  # fmt: skip
        # who takes part is asked for the real shape, which picks the ladders
        for contender in cell.contenders(card, []):
            number += 1
            if number % jobs != index or contender.name.startswith(("sdpa", "torch", "sage")):
                continue
            one = inputs_of(few, device)[0]
            try:
                with torch.no_grad():
                    contender.start(*one)()
                    if contender.redo:
                        contender.redo(*one[:3])
            except Exception as error:
                print(f"{contender.name}: {type(error).__name__}", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code."""
    began = time.monotonic()
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", "--out", type=Path, help="write the rows as JSON here")
    parser.add_argument("--tiny", action="store_true", help="two small shapes, five samples")
    parser.add_argument("--interpret", action="store_true", help="tiny, our kernels interpreted")
    parser.add_argument("--dtype", default="float16,bfloat16", help="float16, bfloat16, float32")
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--direction", default="both", choices=["both", "forward", "backward"])
    parser.add_argument("--contender", default="", help="contenders whose name contains this")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so many")
    parser.add_argument("--jobs", type=int, default=0, help="compile first, in so many processes")
    parser.add_argument("--compile-only", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.interpret:
        os.environ["TRITON_INTERPRET"] = "1"
        options.tiny = True
    device = torch.device("cuda" if torch.cuda.is_available() and not options.interpret else "cpu")
    if device.type == "cpu" and not options.tiny:
        # 16,384² scores on two cores take minutes a sample and say nothing about a card
        print("no GPU: two tiny shapes only, as with --tiny")
        options.tiny = True
    torch.backends.cuda.matmul.allow_tf32 = False
    # interpreted, every launcher is walked through with the ladders of an H200
    card = target.of(device).capability if not options.interpret else (9, 0)
    cells = cells_of(options)
    if options.compile_only:
        index, jobs = map(int, options.compile_only.split("/"))
        launch_each_once(cells, card, device, index, jobs)
        return 0
    if options.jobs:
        compile_all(given, options.jobs, options.seconds / 2)
    rows: list[Row] = []
    missing: list[str] = []
    left: list[str] = []
    for cell in cells:
        title = f"{cell.shape[0]} {cell.dtype} {cell.direction} {cell.scores}"
        if time.monotonic() - began > options.seconds:
            left.append(title)
            continue
        sets = inputs_of(cell, device)
        for contender in cell.contenders(card, missing):
            if options.contender not in contender.name:
                continue
            if time.monotonic() - began > options.seconds:
                left.append(f"{title} {contender.name}")
                continue
            samples = 5 if options.tiny else options.samples
            rows.append(measure(cell, contender, sets, device, samples))
        print(f"{time.monotonic() - began:6.1f} s  {title}", file=sys.stderr, flush=True)
    facts = machine(device)
    print(" · ".join(f"{key} {value}" for key, value in facts.items()))
    print(table(rows))
    for name, entries in (("missing", missing), ("not reached in time", left)):
        if entries:
            print(f"{name}: " + "; ".join(dict.fromkeys(entries)))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        document = {
            "machine": facts,
            "rows": [asdict(row) for row in rows],
            "missing": list(dict.fromkeys(missing)),
            "not_reached": left,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
