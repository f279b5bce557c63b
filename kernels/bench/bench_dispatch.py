"""What a call costs in Python before the GPU gets its work: `attend` beside torch's SDPA.

Small inputs, so that the host is the limit; 200 calls after 20, the same transposes for both.

    python kernels/bench/bench_dispatch.py [--device cpu]
"""

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from sdx_kernels import attend

CALLS, WARM = 200, 20


def microseconds(call: Callable[[], object], device: str) -> float:
    """Mean time from call to return, queued work not waited for."""
    for _ in range(WARM):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


def main() -> None:
    """A row for self- and cross-attention, and for each way to choose."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    dtype = torch.float16 if device == "cuda" else torch.float32
    ways = (None, "sdpa", "triton") if device == "cuda" else (None, "sdpa")
    for name, keys in (("self", 64), ("cross", 77)):
        query = torch.randn(2, 64, 10, 64, dtype=dtype, device=device)
        key = torch.randn(2, keys, 10, 64, dtype=dtype, device=device)

        def torchs(query: torch.Tensor = query, key: torch.Tensor = key) -> torch.Tensor:
            q, k = query.transpose(1, 2), key.transpose(1, 2)
            return F.scaled_dot_product_attention(q, k, k).transpose(1, 2)

        with torch.no_grad():
            peer = microseconds(torchs, device)
            for op in ways:
                ours = microseconds(lambda o=op, q=query, k=key: attend(q, k, k, op=o), device)
                print(f"{name:6} op={op!s:8} attend {ours:6.1f} µs, torch {peer:6.1f} µs")


if __name__ == "__main__":
    main()
