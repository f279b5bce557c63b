"""What a call costs in Python before the GPU gets its work: `attend` beside torch's SDPA.

Small inputs, so that the host is the limit; both in turns, in rounds of 100 calls each, after 20
that do not count, with the same transposes for both. A shared host's speed drifts by half within
seconds, so the figure is the median of the rounds' differences; it may be 12 µs.

    python kernels/bench/bench_dispatch.py --json dispatch.json
    python kernels/bench/bench_dispatch.py --tiny       # a dry run, on the CPU too
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from sdx_kernels import KeyPaddingMask, LowerTriangularMask, attend, count

# a script's folder is on the path, a module's that a test loads is not
sys.path.insert(0, str(Path(__file__).parent))
from bench_attention import machine

CALLS, WARM, ROUNDS = 100, 20, 15

#: most that a call of ours may cost above torch's
LIMIT_US = 12.0

Call = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One way to call, beside torch's.

    Attributes:
        case: what is computed. op: what was asked for; "" = automatic. ran: what ran.
        ours_us, torch_us: microseconds of a call until it returns.
        above_us: the median of the rounds' differences.
    """

    case: str
    op: str
    ran: str
    ours_us: float
    torch_us: float
    above_us: float


@dataclass(frozen=True)
class Case:
    """Inputs in BMHK, with our mask and torch's.

    Attributes:
        queries, keys, dim, dtype: sizes of 2 items of 10 heads.
        mask: "", "causal", "keys" or "bias".
        ops: what is asked for besides the automatic choice, on a GPU.
        graded: the query wants gradients. backward: these are timed, instead of the output.
        automatic: whether the automatic choice is timed; not where it would take other kernels.
    """

    queries: int
    keys: int
    dim: int = 64
    dtype: torch.dtype = torch.float16
    mask: str = ""
    ops: tuple[str, ...] = ()
    graded: bool = False
    backward: bool = False
    automatic: bool = True


CASES = {
    "self": Case(64, 64, ops=("sdpa", "triton")),
    "cross": Case(64, 77, ops=("sdpa", "triton")),
    "causal (CLIP)": Case(77, 77, mask="causal"),
    "key padding": Case(64, 77, mask="keys"),
    "dense bias": Case(64, 77, mask="bias"),
    # bf16 goes through tensor descriptors from 1024 queries and keys on
    "self in bf16": Case(1024, 1024, dtype=torch.bfloat16),
    # the automatic choice takes the wide kernels for long rows only, which keep a card busy
    "512 dims": Case(64, 64, dim=512, ops=("triton-wide",), automatic=False),
    "forward of gradients": Case(64, 77, graded=True),
    "backward": Case(64, 77, backward=True),
    "backward of causal": Case(77, 77, backward=True, mask="causal"),
}


def microseconds(
    first: Call, second: Call, device: torch.device, calls: int, warm: int, rounds: int
) -> tuple[list[float], list[float]]:
    """Times from call to return, queued work not waited for: a mean for each round and call."""

    def mean(call: Call) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls * 1e6

    for _ in range(warm):
        first()
        second()
    pairs = [(mean(first), mean(second)) for _ in range(rounds)]
    return [one for one, _ in pairs], [other for _, other in pairs]


def pair(case: Case, op: str, device: torch.device) -> tuple[Call, Call, Callable[[], str]]:
    """Our call, torch's, and a function that says which implementation ours ran."""
    dtype = case.dtype if device.type == "cuda" else torch.float32
    heads = 2 if case.queries >= 1024 else 10
    query = torch.randn(2, case.queries, heads, case.dim, dtype=dtype, device=device)
    key = torch.randn(2, case.keys, heads, case.dim, dtype=dtype, device=device)
    bias: Any = None
    mask: torch.Tensor | None = None
    if case.mask == "causal":
        bias = LowerTriangularMask()
    elif case.mask == "keys":
        exists = torch.arange(case.keys, device=device).expand(2, -1) < case.keys - 9
        bias, mask = KeyPaddingMask(exists.contiguous()), exists[:, None, None]
    elif case.mask == "bias":
        bias = mask = torch.randn(1, 1, case.queries, case.keys, dtype=dtype, device=device)
    query.requires_grad_(case.graded or case.backward)

    def ours() -> torch.Tensor:
        return attend(query, key, key, bias, op=op or None)[0]

    def torchs() -> torch.Tensor:
        q, k = query.transpose(1, 2), key.transpose(1, 2)
        causal = case.mask == "causal"
        out = F.scaled_dot_product_attention(q, k, k, attn_mask=mask, is_causal=causal)
        return out.transpose(1, 2)

    def ran() -> str:
        return attend(query, key, key, bias, op=op or None)[1].name

    if not case.backward:
        return ours, torchs, ran
    gradient = torch.randn_like(query)
    calls = []
    for forward in (ours, torchs):
        out = forward()

        def backward(out: torch.Tensor = out) -> object:
            return torch.autograd.grad(out, query, gradient, retain_graph=True)

        calls.append(backward)

    def ran_backward() -> str:
        before = {name: count(name) for name in BACKWARDS}
        calls[0]()
        return next((name for name in BACKWARDS if count(name) > before[name]), "torch's")

    return calls[0], calls[1], ran_backward


#: the names under which backwards are counted
BACKWARDS = (
    "triton-backward",
    "triton-tma-backward",
    "triton-wide-backward",
    "reference-backward",
)


def rows(device: torch.device, calls: int, warm: int, rounds: int) -> Iterator[Row]:
    """A row for each case and each way to choose."""
    for name, case in CASES.items():
        ops = (*([""] if case.automatic or device.type != "cuda" else []), *case.ops)
        for op in ops:
            if op.startswith("triton") and device.type != "cuda":
                continue
            our_call, peer, ran = pair(case, op, device)
            ours, theirs = microseconds(our_call, peer, device, calls, warm, rounds)
            above = statistics.median(one - other for one, other in zip(ours, theirs, strict=True))
            mine, others = statistics.median(ours), statistics.median(theirs)
            yield Row(name, op, ran(), round(mine, 2), round(others, 2), round(above, 2))


def main() -> None:
    """Prints the rows and writes them where they are wanted."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a dry run: two calls a row")
    out = os.environ.get("OUT")
    parser.add_argument(
        "--json",
        type=Path,
        default=Path(out) / "dispatch.json" if out else None,
        help="write the rows as JSON here; default: dispatch.json in the folder $OUT, if set",
    )
    options = parser.parse_args()
    device = torch.device(options.device)
    counts = (2, 1, 1) if options.tiny else (CALLS, WARM, ROUNDS)
    found = []
    for row in rows(device, *counts):
        found.append(row)
        limited = device.type == "cuda" and row.above_us > LIMIT_US
        far = f"  above {LIMIT_US:g} µs" if limited else ""
        print(
            f"{row.case:20} op={row.op or 'automatic':11} {row.ran:19} {row.ours_us:7.1f} µs, "
            f"torch {row.torch_us:7.1f} µs, {row.above_us:+7.1f} µs{far}",
            flush=True,
        )
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        document = {
            "machine": machine(device),
            "calls": counts[0],
            "limit_us": LIMIT_US,
            "rows": [asdict(row) for row in found],
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
