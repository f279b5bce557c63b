"""What the report says of layers inside compiled code, where their calls leave no record."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sdx_accel  # noqa: F401  (attaches enable_xattn)
import sdx_patches

from .dispatcher_case import flux, out

NOT_RECORDED = {("not recorded", "calls inside compiled code are not recorded")}


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def told(root: Any) -> set[tuple[str, str]]:
    return {(layer.running, layer.reason) for layer in sdx_patches.layers(root) if layer.patched}


def running(root: Any) -> set[str]:
    return {name for name, _ in told(root)}


def run(unet: Any) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    sample = torch.randn(2, 4, 8, 8, generator=generator)
    context = torch.randn(2, 7, 32, generator=generator)
    with torch.no_grad():
        return unet(sample, torch.tensor(10), context, return_dict=False)[0]


@pytest.fixture
def small(tiny_unet: Any) -> Any:
    """One block with attention: tracing is all the time that these tests take."""
    return tiny_unet(
        block_out_channels=(32,),
        down_block_types=("CrossAttnDownBlock2D",),
        mid_block_type=None,
        up_block_types=("UpBlock2D",),
    )


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager", fullgraph=True)


def test_a_compiled_component_of_a_pipeline(small: Any) -> None:
    pipe = SimpleNamespace(components={"unet": compiled(small)})
    sdx_patches.patch(pipe, owner="a")
    assert running(pipe) == {"not run yet"}
    run(pipe.components["unet"])
    # the wrapper passes the methods on to the model, which must know it too
    assert told(pipe) == told(pipe.components["unet"]) == told(small) == NOT_RECORDED
    sdx_patches.patch(pipe, owner="a", attention_op="reference")
    assert running(pipe) == {"not run yet"}
    run(pipe.components["unet"])
    assert told(pipe) == NOT_RECORDED
    run(small)
    assert running(pipe) == {"reference"}
    sdx_patches.restore(pipe, owner="a")
    assert not any(layer.patched for layer in sdx_patches.layers(pipe))
    assert not any(vars(m).get("_sdx") or m._forward_pre_hooks for m in small.modules())


def test_what_was_recorded_before_is_not_shown_as_current(small: Any) -> None:
    wrapped = compiled(small)
    run(wrapped)
    sdx_patches.patch(small, owner="a")
    run(small)
    assert running(small) == {"sdpa"}
    run(wrapped)
    assert told(small) == NOT_RECORDED


def compile_in_place(model: nn.Module) -> None:
    model.compile(backend="eager", fullgraph=True)


def compile_forward(model: nn.Module) -> None:
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)


@pytest.mark.parametrize("how", [compile_in_place, compile_forward])
def test_other_ways_to_compile(small: Any, how: Callable[[nn.Module], None]) -> None:
    sdx_patches.patch(small, owner="a")
    run(small)
    how(small)
    run(small)
    assert told(small) == NOT_RECORDED


def test_a_compiled_model_of_the_dispatcher() -> None:
    model = flux(singles=1)
    sdx_patches.patch(model, owner="a")
    out(model)
    assert running(model) == {"sdpa"}
    assert torch.equal(out(compiled(model)), out(model))
    assert running(model) == {"sdpa"}
    out(compiled(model))
    assert told(model) == NOT_RECORDED
