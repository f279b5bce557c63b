"""Times attention forward on the shapes that pictures really launch, beside torch's own kernels.

Every implementation gets the same inputs, warm-up and number of samples; inputs are rotated so that
no run finds its operands in the L2 cache; losses are printed as readily as wins.

    python kernels/bench/bench_attention.py --out attention.json
    python kernels/bench/bench_attention.py --tiny          # a dry run, on the CPU too
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from sdx_kernels import KernelError, LowerTriangularMask, attend, choose, target
from sdx_kernels.testing import REAL_SHAPES, random_inputs

IMPLEMENTATIONS = (
    "automatic",
    "triton",
    "sdpa",
    "sdpa-flash",
    "sdpa-efficient",
    "sdpa-cudnn",
)

Shape = tuple[str, int, int, int, int, int, bool]

TINY: tuple[Shape, ...] = (
    ("tiny-self", 1, 64, 64, 2, 16, False),
    ("tiny-causal", 1, 33, 33, 2, 16, True),
)


@dataclass(frozen=True)
class Row:
    """One measurement; times in milliseconds."""

    shape: str
    dtype: str
    implementation: str
    ran: str
    median_ms: float | None
    p10_ms: float | None
    p90_ms: float | None
    tflops: float | None
    note: str


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
        # a busy GPU hides the host's launch time, which a short kernel would otherwise measure
        torch.cuda._sleep(200_000)
        start_event.record()
        call(index)
        end_event.record()
    torch.cuda.synchronize(device)
    return [start_event.elapsed_time(end_event) for start_event, end_event in events]


def measure(
    shape: Shape, dtype: torch.dtype, implementation: str, device: torch.device, samples: int
) -> Row:
    """One shape through one implementation; a refusal becomes the row's note."""
    name, batch, queries, keys, heads, head_dim, causal = shape
    short = str(dtype).removeprefix("torch.")
    bytes_a_set = batch * (queries + 2 * keys) * heads * head_dim * dtype.itemsize
    # at least 64 MiB between two uses of one operand, more than any L2 cache
    sets = max(2, min(32, 1 + (64 << 20) // max(1, bytes_a_set)))
    inputs = [
        random_inputs(batch, queries, keys, heads, head_dim, dtype=dtype, device=device, seed=seed)
        for seed in range(sets)
    ]
    bias = LowerTriangularMask() if causal else None
    op = None if implementation == "automatic" else implementation
    try:
        ran = choose(*inputs[0], bias, op=op).name
        with torch.no_grad():
            attend(*inputs[0], bias, op=op)
            times = samples_ms(
                lambda index: attend(*inputs[index % sets], bias, op=op), device, samples=samples
            )
    except (KernelError, torch.OutOfMemoryError) as error:
        note = str(error).splitlines()[0] if not isinstance(error, KernelError) else "refused"
        return Row(name, short, implementation, "", None, None, None, None, note)
    median = statistics.median(times)
    deciles = statistics.quantiles(times, n=10)
    flops = 4 * batch * heads * queries * keys * head_dim / (2 if causal else 1)
    return Row(
        name,
        short,
        implementation,
        ran,
        round(median, 5),
        round(deciles[0], 5),
        round(deciles[-1], 5),
        round(flops / median / 1e9, 2),
        "",
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


def table(rows: list[Row]) -> str:
    """The rows as text: median (p10–p90) in ms, TFLOP/s and the ratio to torch's own pick."""
    lines = [
        f"{'shape':<22} {'implementation':<16} {'ran':<10} {'ms (p10–p90)':<28} TFLOP/s  /sdpa"
    ]
    torchs = {(row.shape, row.dtype): row.median_ms for row in rows if row.implementation == "sdpa"}
    for row in rows:
        head = f"{row.shape:<22} {row.implementation:<16} {row.ran:<10} "
        if row.median_ms is None:
            lines.append(head + row.note)
            continue
        peer = torchs.get((row.shape, row.dtype))
        ratio = f"{peer / row.median_ms:5.2f}x" if peer else "     –"
        span = f"{row.median_ms:.4f} ({row.p10_ms:.4f}–{row.p90_ms:.4f})"
        lines.append(f"{head}{span:<28} {row.tflops:>7}  {ratio}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="write the rows as JSON here")
    parser.add_argument("--tiny", action="store_true", help="two small shapes, five samples")
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16", "float32"])
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.tiny:
        # 16,384² scores on two cores take minutes a sample and say nothing about a card
        print("no GPU: two tiny shapes only, as with --tiny")
        options.tiny = True
    dtype = torch.float32 if device.type == "cpu" else getattr(torch, options.dtype)
    shapes: tuple[Shape, ...] = TINY if options.tiny else REAL_SHAPES
    rows = [
        measure(shape, dtype, implementation, device, 5 if options.tiny else options.samples)
        for shape in shapes
        if options.only in shape[0]
        for implementation in IMPLEMENTATIONS
    ]
    facts = machine(device)
    print(" · ".join(f"{key} {value}" for key, value in facts.items()))
    print(table(rows))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        document = {"machine": facts, "rows": [asdict(row) for row in rows]}
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
