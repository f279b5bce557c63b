"""Tiny pipelines around transformers, and executors that move their weights on the CPU."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sdx_accel.budget.machine import Machine
from sdx_accel.budget.plan import Plan, StreamPlan
from sdx_accel.budget.profile import StreamUnit
from sdx_accel.budget.streaming import best_stream
from sdx_accel.budget.units import MIB
from sdx_accel.runtime.architectures import architecture
from sdx_accel.runtime.checkpoints import load
from sdx_accel.runtime.executor import Executor
from sdx_accel.runtime.offline_tokenizer import build_long_tokenizer
from sdx_accel.runtime.random_models import build_random_component
from sdx_accel.runtime.stream_order import layout, order_of
from sdx_accel.runtime.weights import unit_bytes

#: the text models of each phase, by the start of their names, and the one that denoises
_PARTS = {"text": "text_encoder", "denoise": "transformer", "decode": "vae", "encode": "vae"}
STEPS = 2


def _pixart(name: str, **config: Any) -> Any:
    import diffusers

    t5 = architecture("random:sd3-tiny").components["text_encoder_3"]
    vae = architecture("random:sdxl-tiny").components["vae"]
    big = architecture("random:pixart-sigma").components["transformer"]
    small = {
        "sample_size": 16,
        "num_layers": 3,
        "attention_head_dim": 32,
        "num_attention_heads": 3,
        "cross_attention_dim": 96,
        "caption_channels": 192,
    }
    transformer = dataclasses.replace(big, config={**big.config, **small, **config})
    return getattr(diffusers, name)(
        tokenizer=build_long_tokenizer(128),
        text_encoder=build_random_component(t5, torch.float32),
        vae=build_random_component(vae, torch.float32),
        transformer=build_random_component(transformer, torch.float32),
        scheduler=diffusers.DPMSolverMultistepScheduler(),
    )


def build(name: str) -> Any:
    """One of `PIPELINES`, the same weights each time."""
    pipe = PIPELINES[name]()
    pipe.set_progress_bar_config(disable=True)
    return pipe


PIPELINES: dict[str, Callable[[], Any]] = {
    "sd3": lambda: load("random:sd3-tiny", dtype="fp32"),
    "flux": lambda: load("random:flux-tiny", dtype="fp32"),
    "pixart sigma": lambda: _pixart("PixArtSigmaPipeline"),
    "pixart alpha": lambda: _pixart(
        # the size at which the picture's own is an input
        "PixArtAlphaPipeline",
        sample_size=128,
        use_additional_conditions=True,
    ),
}


def latents(pipe: Any, seed: int = 0, **arguments: Any) -> Tensor:
    """What a pipeline makes of equal noise at 64 pixels and two steps, short of the VAE."""
    usual: dict[str, Any] = {"height": 64, "width": 64, "num_inference_steps": STEPS}
    if "PixArt" in type(pipe).__name__:
        # their tables begin at 256 pixels
        usual |= {"use_resolution_binning": False, "clean_caption": False}
    made = pipe(
        "a red apple",
        generator=torch.Generator().manual_seed(seed),
        output_type="latent",
        **(usual | arguments),
    ).images
    assert made.isfinite().all()
    return made


def alone(plan: Plan) -> Plan:
    """The same plan with everything out that a phase does not need."""
    placement = {
        phase: {name: n for name, n in placed.items() if name.startswith(_PARTS[phase])}
        for phase, placed in plan.placement.items()
    }
    return dataclasses.replace(plan, placement=placement)


def executor_of(pipe: Any) -> Any:
    return pipe.__dict__["_sdx_budget"].executor


class Moving(Executor):
    """Moves whole units on the CPU as it would to a card, and notes what each phase has."""

    def __init__(self, *args: Any, moves: bool) -> None:
        super().__init__(*args, moves=True)
        self.seen: dict[str, set[str]] = {}

    def hold(self, plan: Plan) -> None:
        super().hold(alone(plan))

    def enter(self, phase: str) -> None:
        super().enter(phase)
        loaded = {n for n, units in self._units.items() if any(u.loaded for u in units)}
        self.seen.setdefault(phase, loaded)


def streaming(copies: Any, phases: tuple[str, ...], resident: int, ring: int | None) -> type:
    """A class of executors that run the models of some phases from a ring.

    Args:
        copies: the stand-in for the card's copy stream.
        phases: whose weights pass through a ring.
        resident: every so many units one stays; 0 for none.
        ring: its size in largest units; None for the layout that the planner finds the fastest.
    """

    class Streaming(Executor):
        def __init__(self, *args: Any, moves: bool) -> None:
            super().__init__(*args, moves=True, copies=copies)
            self.passes: list[int] = []

        def hold(self, plan: Plan) -> None:
            streams = tuple(self._lay(phase) for phase in phases)
            placement = {
                phase: {name: 0 if phase in phases else n for name, n in placed.items()}
                for phase, placed in alone(plan).placement.items()
            }
            super().hold(dataclasses.replace(plan, streams=streams, placement=placement))

        def _lay(self, phase: str) -> StreamPlan:
            names = [name for name in self.modules if name.startswith(_PARTS[phase])]
            found = [layout(n, self.modules[n], *order_of(self.modules[n])) for n in names]
            everything = sum(unit_bytes(group) for each in found for group in each.groups)
            return _stream_plan(
                phase, names, [u for each in found for u in each.units], everything, resident, ring
            )

        def _stop_stream(self) -> None:
            if self.streamer is not None:
                self.passes.append(self.streamer.passes)
            super()._stop_stream()

    return Streaming


def _stream_plan(
    phase: str,
    names: list[str],
    order: list[StreamUnit],
    everything: int,
    resident: int,
    ring: int | None,
) -> StreamPlan:
    if ring is None:
        rest = everything - sum(unit.n_bytes for unit in order)
        # segments of 2 and 20 MiB would not let the tiny models fit into less than all of them
        found = best_stream(phase, order, Machine.generic(), 64 * MIB, rest)
        assert found is not None
        return found
    stay = tuple(i for i in range(len(order)) if resident and i % resident == 0)
    gone = [i for i in range(len(order)) if i not in stay]
    size = ring * max(order[i].n_bytes for i in gone)
    slots, offset = [], 0
    for i in gone:
        if offset + order[i].n_bytes > size:
            offset = 0
        slots.append((i, offset))
        offset += order[i].n_bytes
    total = sum(order[i].n_bytes for i in gone)
    kept = everything - total
    return StreamPlan(phase, tuple(names), stay, tuple(slots), kept, size, total, 0.0, 0.0)
