"""A patched model compiles in one graph where the stock one does, in whatever order."""

from typing import Any

import pytest
import torch
from torch import Tensor

import sdx_accel  # noqa: F401  (attaches enable_xattn)
import sdx_patches
from sdx_accel.runtime.checkpoints import load


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    torch._dynamo.reset()


def test_fullgraph_compiles_as_the_stock_model_does() -> None:
    unet = load("random:sdxl-tiny", dtype="fp32").unet
    unet.enable_xattn()
    config = unet.config
    pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    arguments = {
        "encoder_hidden_states": torch.randn(2, 77, config.cross_attention_dim),
        "added_cond_kwargs": {
            "text_embeds": torch.randn(2, pooled),
            "time_ids": torch.randn(2, 6),
        },
        "return_dict": False,
    }
    sample, step = torch.randn(2, 4, 8, 8), torch.tensor(1.0)
    with torch.no_grad():
        expected = unet(sample, step, **arguments)[0]
        compiled = torch.compile(unet, backend="eager", fullgraph=True)
        assert torch.equal(compiled(sample, step, **arguments)[0], expected)


def run(unet: Any) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    sample = torch.randn(2, 4, 8, 8, generator=generator)
    context = torch.randn(2, 7, 32, generator=generator)
    with torch.no_grad():
        return unet(sample, torch.tensor(10), context, return_dict=False)[0]


def small(tiny_unet: Any) -> Any:
    """One block with attention: tracing is all the time that these tests take."""
    return tiny_unet(
        block_out_channels=(32,),
        down_block_types=("CrossAttnDownBlock2D",),
        mid_block_type=None,
        up_block_types=("UpBlock2D",),
    )


class Counting:
    """A backend that runs a graph as it is and counts the graphs that it was given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


def test_switching_on_and_off_around_a_compiled_model(tiny_unet: Any) -> None:
    """It is traced again when ours come in; off again, the first graph fits the same objects."""
    unet = small(tiny_unet)
    expected = run(unet)
    backend = Counting()
    compiled = torch.compile(unet, backend=backend, fullgraph=True)
    assert torch.allclose(run(compiled), expected, atol=1e-6)
    assert backend.graphs == 1
    compiled.enable_xattn()
    assert torch.allclose(run(compiled), expected, atol=1e-6)
    assert backend.graphs == 2
    compiled.disable_xattn()
    assert torch.allclose(run(compiled), expected, atol=1e-6)
    assert backend.graphs == 2
    assert not any(layer.patched for layer in sdx_patches.layers(compiled))


def test_a_patched_model_is_traced_once(tiny_unet: Any) -> None:
    unet = small(tiny_unet)
    unet.enable_xattn()
    backend = Counting()
    compiled = torch.compile(unet, backend=backend, fullgraph=True)
    for _ in range(3):
        run(compiled)
    assert backend.graphs == 1


def test_repeated_blocks_compile_with_no_break(tiny_unet: Any) -> None:
    unet = small(tiny_unet)
    expected = run(unet)
    unet.enable_xattn()
    unet.compile_repeated_blocks(backend="eager", fullgraph=True)
    assert torch.allclose(run(unet), expected, atol=1e-6)
    layers = sdx_patches.layers(unet)
    assert all(layer.patched for layer in layers)
    # a graph records nothing, and what was never recorded is not made up
    assert {layer.running for layer in layers} == {"not recorded"}
