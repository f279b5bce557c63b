"""Transformers whose weights pass through a ring: their units, and bits that never change."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

import sdx_accel  # noqa: F401  (attaches enable_xattn)
from sdx_accel.budget.profile import Component
from sdx_accel.budget.units import MIB
from sdx_accel.runtime import budget_session, profiler, stream_order
from sdx_accel.runtime.architectures import architecture
from sdx_accel.runtime.profiler import Job, profile_job

from .dit_case import PIPELINES, STEPS, build, executor_of, latents, streaming
from .stream_case import Early, Late

# -- the public architectures


def _component(spec: str, name: str) -> Component:
    description = architecture(spec)
    job = Job(256, 256, guided=not description.embeds_guidance)
    found = profile_job(description, job, dict.fromkeys(description.components, "float16"))
    return next(c for c in found.components if c.name == name)


@pytest.mark.parametrize(
    ("spec", "name", "most", "stays"),
    [
        ("random:sd3", "transformer", 96, 108),
        # T5's embedding of 251 MiB goes by two names
        ("random:sd3", "text_encoder_3", 160, 252),
        # single layers of any size are units: norms of 108 MiB
        ("random:flux", "transformer", 109, 1),
        pytest.param("random:pixart-sigma", "transformer", 96, 11, marks=pytest.mark.slow),
    ],
)
def test_nearly_all_bytes_are_in_units_of_a_bounded_size(
    spec: str, name: str, most: int, stays: int
) -> None:
    component = _component(spec, name)
    assert max(unit.n_bytes for unit in component.stream) <= most * MIB
    rest = component.n_bytes - sum(unit.n_bytes for unit in component.stream)
    assert 0 <= rest <= stays * MIB
    places = sorted((unit.chunk, unit.offset, unit.n_bytes) for unit in component.stream)
    for (chunk, start, size), (other, begin, _) in pairwise(places):
        assert chunk < other or start + size <= begin


def test_units_of_flux_are_in_order_of_execution() -> None:
    names = [unit.name.split(".", 1)[1] for unit in _component("random:flux", "transformer").stream]
    assert names[0] == "x_embedder"
    assert names[-2:] == ["norm_out", "proj_out"]
    blocks = [n.split(".")[:2] for n in names if "transformer_blocks" in n]
    seen = [b for i, b in enumerate(blocks) if i == 0 or blocks[i - 1] != b]
    # each block's units follow each other, the joint blocks before the single ones
    assert seen == [
        *(["transformer_blocks", str(i)] for i in range(19)),
        *(["single_transformer_blocks", str(i)] for i in range(38)),
    ]
    single = [n.split(".", 2)[2] for n in names if n.startswith("single_transformer_blocks.7.")]
    assert single == ["norm", "proj_mlp", "attn", "proj_out"]


def test_operations_of_a_step_are_those_of_its_products() -> None:
    # two for each token and weight of its products, and the attention, which in joint blocks is
    # between the units
    stream = _component("random:flux", "transformer").stream
    width, blocks = 3072, 19 + 38
    tokens, text = 256, 512
    attention = blocks * 4.0 * (tokens + text) ** 2 * width
    products = 2.0 * (19 * (tokens + text) * 12 * width**2 + 38 * (tokens + text) * 12 * width**2)
    assert sum(unit.flops for unit in stream) == pytest.approx(attention + products, rel=0.01)


# -- whole pictures from a ring


@pytest.fixture(scope="module")
def small_units() -> Iterator[None]:
    """Units of at most 100 KiB: dozens in the tiny models, instead of one or two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_order, "STREAM_BYTES", 100 << 10)
        profiler._traced.cache_clear()
        yield
    profiler._traced.cache_clear()


@pytest.fixture(scope="module")
def pipes() -> Callable[[str], Any]:
    made: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in made:
            made[name] = build(name)
        return made[name]

    return get


def _both(
    monkeypatch: pytest.MonkeyPatch,
    pipe: Any,
    copies: Any,
    phases: tuple[str, ...] = ("denoise",),
    resident: int = 3,
    ring: int | None = 2,
    **arguments: Any,
) -> Any:
    """The passes and the plan of a streamed run whose latents were those of the resident one."""
    pipe.enable_xattn()
    free = latents(pipe, **arguments)
    monkeypatch.setattr(budget_session, "Executor", streaming(copies, phases, resident, ring))
    try:
        pipe.enable_xattn(vram=8, device="cpu")
        executor = executor_of(pipe)
        assert torch.equal(free, latents(pipe, **arguments))
        assert executor.streamer is None
        assert all(stream.slots for stream in executor.plan.streams)
        return executor.passes, executor.plan.streams, executor.stream_units("transformer")
    finally:
        pipe.disable_xattn()


@pytest.mark.parametrize("copies", [Late, Early])
@pytest.mark.parametrize("name", PIPELINES)
def test_latents_equal_the_resident_run(
    small_units: None, pipes: Any, monkeypatch: pytest.MonkeyPatch, name: str, copies: Any
) -> None:
    passes, (planned,), _ = _both(monkeypatch, pipes(name), copies())
    assert passes == [STEPS]
    assert len(planned.slots) >= 10


@pytest.mark.parametrize("name", ["sd3", "flux", "pixart sigma"])
def test_nothing_stays_and_the_texts_stream_too(
    small_units: None, pipes: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    passes, _, _ = _both(monkeypatch, pipes(name), Early(), ("text", "denoise"), resident=0)
    # the negative prompt is a pass of its own
    assert passes == [1 if name == "flux" else 2, STEPS]


@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_layouts_of_the_planner(
    small_units: None, pipes: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    passes, (planned,), _ = _both(monkeypatch, pipes(name), Late(), ring=None)
    assert planned.components == ("transformer",)
    assert passes == [STEPS]


def test_two_predictions_in_turn_are_two_passes(
    small_units: None, pipes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {"negative_prompt": "blur", "true_cfg_scale": 2.0}
    passes, _, _ = _both(monkeypatch, pipes("flux"), Late(), **arguments)
    assert passes == [2 * STEPS]


def test_blocks_that_guidance_leaves_out(
    small_units: None, pipes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a third call in the steps between 1 % and 20 % goes past these blocks
    arguments = {"skip_guidance_layers": [1], "num_inference_steps": 6, "height": 32, "width": 32}
    passes, _, _ = _both(monkeypatch, pipes("sd3"), Late(), **arguments)
    assert passes == [6 + 1]


def test_a_lora_in_the_ring(small_units: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from peft import LoraConfig

    pipe = build("flux")
    torch.manual_seed(0)
    pipe.transformer.add_adapter(
        LoraConfig(r=4, target_modules=["to_q", "proj_mlp"], init_lora_weights=False)
    )
    _, _, units = _both(monkeypatch, pipe, Early())
    names = [unit.name for unit in units]
    assert len(names) > 10
    assert not any("lora" in name or "base_layer" in name for name in names)
