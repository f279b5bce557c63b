"""Other ways of placing weights, and other tensors on the card, beside a budget.

The options are switched on by the very calls that users have in their scripts, with the CPU in the
place of the card that they would move weights to.
"""

import re
from dataclasses import replace

import pytest
import torch
from diffusers import DiffusionPipeline

from sdx_accel.budget.machine import Machine
from sdx_accel.budget.search import SLACK_BYTES
from sdx_accel.budget.units import GIB, MIB
from sdx_accel.errors import PlacementError
from sdx_accel.runtime import budget_session
from sdx_accel.runtime.checkpoints import load
from sdx_accel.runtime.enforce import NoEnforcer
from sdx_accel.runtime.session_plans import Planner

CPU = torch.device("cpu")


def _device_map(folder):
    return DiffusionPipeline.from_pretrained(folder, device_map="cpu", local_files_only=True)


def _loaded(folder):
    return load(folder, dtype="fp32")


def _several_devices(folder):
    # what `device_map="balanced"` leaves on a machine with cards
    pipe = _loaded(folder)
    pipe.hf_device_map = {"unet": 0, "vae": "cpu", "text_encoder": 0, "text_encoder_2": "cpu"}
    return pipe


def _model_offload(folder):
    pipe = _loaded(folder)
    pipe.enable_model_cpu_offload(device="cpu")
    return pipe


def _sequential_offload(folder):
    pipe = _loaded(folder)
    pipe.enable_sequential_cpu_offload(device="cpu")
    return pipe


def _group_offload(folder, **options):
    pipe = _loaded(folder)
    pipe.enable_group_offload(onload_device=CPU, offload_device=CPU, **options)
    return pipe


OPTIONS = {
    "device_map": (_device_map, "load it without device_map and call enable_xattn(vram=…)"),
    "device_map over devices": (_several_devices, "load it without device_map"),
    "enable_model_cpu_offload": (_model_offload, "drop the call of enable_model_cpu_offload()"),
    "enable_sequential_cpu_offload": (
        _sequential_offload,
        "drop the call of enable_model_cpu_offload() or enable_sequential_cpu_offload()",
    ),
    "enable_group_offload, leaves": (
        lambda folder: _group_offload(folder, offload_type="leaf_level"),
        "drop the call of enable_group_offload()",
    ),
    "enable_group_offload, blocks": (
        lambda folder: _group_offload(folder, offload_type="block_level", num_blocks_per_group=1),
        "drop the call of enable_group_offload()",
    ),
}


def _hooks(pipe):
    return [
        (name, path, sorted(key for key in vars(part) if "hook" in key), type(part.forward))
        for name, module in pipe.components.items()
        if isinstance(module, torch.nn.Module)
        for path, part in module.named_modules()
    ]


@pytest.mark.parametrize("name", list(OPTIONS))
def test_an_option_that_places_weights_is_refused_by_its_name(saved_tiny_sdxl, name):
    build, advice = OPTIONS[name]
    pipe = build(saved_tiny_sdxl)
    pipe.set_progress_bar_config(disable=True)
    before, cls = _hooks(pipe), type(pipe)
    with pytest.raises(PlacementError, match=re.escape(advice)) as caught:
        pipe.enable_xattn(vram=8, device="cpu")
    assert "\n" not in str(caught.value)
    assert _hooks(pipe) == before
    assert type(pipe) is cls
    assert pipe.xattn_report().plan is None
    assert not any(layer.patched for layer in pipe.xattn_report().layers)
    # there are no such devices; and accelerate itself cannot run a text encoder from CPU to CPU
    if name not in ("device_map over devices", "enable_sequential_cpu_offload"):
        picture = pipe(
            "a red apple", height=64, width=64, num_inference_steps=1, output_type="np"
        ).images
        assert picture.shape == (1, 64, 64, 3)


@pytest.mark.parametrize("name", list(OPTIONS))
def test_an_option_that_places_weights_goes_well_with_attention_alone(saved_tiny_sdxl, name):
    pipe = OPTIONS[name][0](saved_tiny_sdxl)
    pipe.enable_xattn()
    assert any(layer.patched for layer in pipe.xattn_report().layers)
    pipe.disable_xattn()


@pytest.mark.parametrize("name", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"])
def test_once_dropped_it_is_not_in_the_way(saved_tiny_sdxl, name):
    pipe = OPTIONS[name][0](saved_tiny_sdxl)
    pipe.remove_all_hooks()
    pipe.enable_xattn(vram=8, device="cpu")
    assert pipe.xattn_report().plan.feasible
    pipe.disable_xattn()


class Card:
    """A card with 0.6 GiB of context, of which other tensors hold some."""

    device, idle_bytes, key = CPU, 0, "card"
    free_bytes = is_disturbed = None

    def process_bytes(self):
        return 600 * MIB

    def settle(self):
        pass

    def machine(self, record):
        return replace(Machine.generic(), non_torch_bytes=600 * MIB)


def _plan_on_a_card(monkeypatch, pipe, others):
    """The plan of a held pipeline, as it would be on a card."""
    monkeypatch.setattr(budget_session, "open_card", lambda device: Card())
    monkeypatch.setattr(budget_session, "record_for", lambda card: None)
    monkeypatch.setattr(budget_session, "read_idle_cards", lambda: None)
    monkeypatch.setattr(budget_session, "warm_up", lambda device, dtypes: None)
    monkeypatch.setattr(budget_session, "Enforcer", lambda card: NoEnforcer())
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: others)
    session = pipe.__dict__["_sdx_budget"]
    modules = session.executor.modules
    place, _ = session._start_card(modules)
    planner = Planner(session.terms, place, session._planner.description, modules)
    return planner.plan(session._default_job())


@pytest.mark.parametrize(
    ("others", "said"),
    [(0, None), (SLACK_BYTES, None), (SLACK_BYTES + MIB, "0.06 GiB"), (3 * GIB // 2, "1.50 GiB")],
)
def test_other_tensors_are_said_to_be_in_use_and_counted(
    saved_tiny_sdxl, monkeypatch, others, said
):
    """What is below the slack that every plan leaves changes nothing."""
    pipe = _loaded(saved_tiny_sdxl)
    pipe.enable_xattn(vram=8, device="cpu", learn=False)
    alone = _plan_on_a_card(monkeypatch, pipe, 0)
    plan = _plan_on_a_card(monkeypatch, pipe, others)
    note = f"already in use by other tensors of this process: {said}"
    assert (note in plan.explain()) == (said is not None)
    assert ("already in use" in plan.explain()) == (said is not None)
    counted = (plan.predicted_peak_gib - alone.predicted_peak_gib) * GIB
    assert counted == pytest.approx(others if said else 0, abs=MIB)


def test_other_tensors_can_make_a_job_not_fit(saved_tiny_sdxl, monkeypatch):
    pipe = _loaded(saved_tiny_sdxl)
    pipe.enable_xattn(vram=2, device="cpu", learn=False)
    assert _plan_on_a_card(monkeypatch, pipe, 0).feasible
    full = _plan_on_a_card(monkeypatch, pipe, 3 * GIB // 2)
    assert not full.feasible
    assert "already in use by other tensors of this process: 1.50 GiB" in full.explain()


@pytest.mark.gpu
def test_other_tensors_on_a_real_card_are_said_to_be_in_use(saved_tiny_sdxl):
    torch.zeros(1, device="cuda")
    pipe = _loaded(saved_tiny_sdxl)
    kept = torch.zeros(1 << 28, device="cuda")  # 1 GiB of fp32
    # and what earlier tests have left
    there = torch.cuda.memory_allocated() / GIB
    pipe.enable_xattn(vram=8)
    plan = pipe.xattn_report().plan
    said = re.search(r"in use by other tensors of this process: (\S+) GiB", plan.explain())
    assert said is not None
    assert float(said[1]) == pytest.approx(there, abs=0.05)
    assert plan.predicted_peak_gib > 1.0
    pipe.disable_xattn()
    del kept
