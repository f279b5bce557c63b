"""Attention over two segments of keys: joined beforehand, or in parts that are merged afterwards.

Two questions of the patches. Added key and value projections (Kandinsky: a picture's own tokens and
the text's) attend to both segments as to one sequence: is it cheaper to join keys and values, or to
attend to each and merge? And an IP-Adapter attends to a picture's few tokens beside the text: what
does that second pass cost beside the first, which is the most that one pass for both could save?

    python kernels/bench/bench_segments.py [--json FILE] [--tiny]

Milliseconds of a CUDA graph's replay, median of 25; eager on the CPU.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sdx_kernels import (
    memory_efficient_attention,
    memory_efficient_attention_partial,
    merge_attentions,
)

#: (name, batch, queries, heads, dim, keys of each segment)
SHAPES = (
    ("kandinsky-64", 2, 4096, 6, 64, (4096, 10)),
    ("kandinsky-32", 2, 1024, 12, 64, (1024, 10)),
    ("kandinsky-16", 2, 256, 18, 64, (256, 10)),
    ("ip-adapter-64", 2, 4096, 10, 64, (77, 4)),
    ("ip-adapter-32", 2, 1024, 20, 64, (77, 4)),
    ("ip-adapter-plus-32", 2, 1024, 20, 64, (77, 16)),
)

Tensors = tuple[torch.Tensor, ...]


def joined(query: torch.Tensor, keys: Tensors, values: Tensors) -> torch.Tensor:
    """One softmax over both, keys and values joined before it."""
    return memory_efficient_attention(query, torch.cat(keys, 1), torch.cat(values, 1))


def merged(query: torch.Tensor, keys: Tensors, values: Tensors) -> torch.Tensor:
    """One softmax over both, from partial outputs and their log-sum-exp."""
    parts = [
        memory_efficient_attention_partial(query, key, value)
        for key, value in zip(keys, values, strict=True)
    ]
    outs, lses = zip(*parts, strict=True)
    return merge_attentions(list(outs), list(lses))[0].to(query.dtype)


def first(query: torch.Tensor, keys: Tensors, values: Tensors) -> torch.Tensor:
    """The text alone."""
    return memory_efficient_attention(query, keys[0], values[0])


def both(query: torch.Tensor, keys: Tensors, values: Tensors) -> torch.Tensor:
    """A softmax each, as an IP-Adapter has it."""
    out = memory_efficient_attention(query, keys[0], values[0])
    return out + 0.7 * memory_efficient_attention(query, keys[1], values[1])


def milliseconds(call: Callable[[], torch.Tensor], device: str) -> float:
    """Median of 25 replays (eager calls on the CPU)."""
    if device == "cpu":
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e3
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(25):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def measure(shape: tuple[Any, ...], device: str) -> dict[str, Any]:
    """A row: each way's time, and how far the two forms of one softmax are apart."""
    name, batch, queries, heads, dim, lengths = shape
    dtype = torch.float32 if device == "cpu" else torch.float16
    new = torch.Generator(device).manual_seed(0)

    def tensor(length: int) -> torch.Tensor:
        return torch.randn(batch, length, heads, dim, generator=new, device=device, dtype=dtype)

    query = tensor(queries)
    keys, values = (tuple(tensor(n) for n in lengths) for _ in range(2))
    ways = {"joined": joined, "merged": merged, "first": first, "both": both}
    row: dict[str, Any] = {"shape": name, "keys": list(lengths)}
    with torch.no_grad():
        for way, call in ways.items():
            row[way + "_ms"] = milliseconds(lambda call=call: call(query, keys, values), device)
        row["difference"] = float(
            (joined(query, keys, values) - merged(query, keys, values)).abs().max()
        )
    return row


def main() -> None:
    """Prints a row for each shape."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--tiny", action="store_true", help="two small shapes")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() and not options.tiny else "cpu"
    shapes = SHAPES
    if device == "cpu":
        shapes = (("tiny", 1, 64, 2, 32, (64, 4)), ("tiny-ip", 1, 64, 2, 32, (77, 4)))
    rows = []
    for shape in shapes:
        rows.append(measure(shape, device))
        print(json.dumps(rows[-1]), flush=True)
    if options.json:
        document = {"device": device, "torch": torch.__version__, "rows": rows}
        if device == "cuda":
            document["device"] = torch.cuda.get_device_name()
        options.json.write_text(json.dumps(document, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
