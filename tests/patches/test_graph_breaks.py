"""Patched models under torch's graph makers: no break that is ours, and as many sizes as wanted."""

from typing import Any

import pytest
import torch
from torch import Tensor

import sdx_accel  # noqa: F401  (attaches enable_xattn)
import sdx_patches
from sdx_kernels import count


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    torch._dynamo.reset()


def arguments(
    side: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(side)
    sample = torch.randn(2, 4, side, side, generator=generator)
    context = torch.randn(2, 7, 32, generator=generator)
    step = torch.tensor(10, device=device)
    return sample.to(device, dtype), step, context.to(device, dtype)


def test_case_057_a_patched_unet_has_no_more_graph_breaks(tiny_unet: Any) -> None:
    unet = tiny_unet()

    def explained() -> Any:
        torch._dynamo.reset()
        with torch.no_grad():
            return torch._dynamo.explain(unet)(*arguments(8), return_dict=False)

    stock = explained()
    unet.enable_xattn()
    assert any(layer.patched for layer in sdx_patches.layers(unet))
    ours = explained()
    assert ours.graph_count >= 1
    assert ours.graph_break_count <= stock.graph_break_count
    frames = [
        frame.filename
        for broken in ours.break_reasons
        for frame in getattr(broken, "user_stack", ())
    ]
    assert not [name for name in frames if "sdx_" in name], ours.break_reasons
    assert not [broken for broken in ours.break_reasons if "sdx_" in str(broken.reason)]


@pytest.mark.gpu
def test_case_060_graphs_of_four_sizes_stay_valid(tiny_unet: Any) -> None:
    unet = tiny_unet().to("cuda", torch.float16)
    unet.enable_xattn()
    sides = (8, 10, 12, 14)
    inputs = {side: arguments(side, "cuda", torch.float16) for side in sides}

    def run(side: int) -> Tensor:
        with torch.no_grad():
            found: Tensor = unet(*inputs[side], return_dict=False)[0]
        return found

    before = sum(count(name) for name in ("triton", "triton-short", "triton-tma", "sdpa"))
    expected = {side: run(side).clone() for side in sides}
    assert sum(count(name) for name in ("triton", "triton-short", "triton-tma", "sdpa")) > before
    graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
    for side in sides:
        # what cuBLAS and convolutions set up must not be captured
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run(side)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(side)
        graphs[side] = graph, out
    allocated = []
    for _ in range(2):
        # the first size again after the last: its graph must not have been lost to another
        for side in (*sides, sides[0]):
            graph, out = graphs[side]
            out.zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out, expected[side])
        allocated.append(torch.cuda.memory_allocated())
    assert allocated[0] == allocated[1]
