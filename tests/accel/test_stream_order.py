"""Units in order of execution: the same from configurations and from live models."""

import pytest
import torch
from torch import nn

from sdx_accel.budget.units import MIB
from sdx_accel.runtime import profiler, stream_order
from sdx_accel.runtime.architectures import architecture
from sdx_accel.runtime.checkpoints import describe_pipeline, load
from sdx_accel.runtime.controlnets import load_controlnet, with_controlnets
from sdx_accel.runtime.ip_adapters import load_ip_adapters, with_ip_adapters
from sdx_accel.runtime.pipeline_parts import pipeline_models
from sdx_accel.runtime.profiler import Job, profile_job
from sdx_accel.runtime.stream_order import UnitTrace, layout, stream_modules
from sdx_accel.runtime.weights import weight_tensors


def _profile(description, job, dtype, modules=None):
    dtypes = dict.fromkeys(description.components, dtype)
    found = profile_job(description, job, dtypes, modules)
    return {component.name: component for component in found.components}


@pytest.fixture(scope="module")
def sdxl():
    """SDXL in 16 bits at 1024², without weights."""
    return _profile(architecture("random:sdxl"), Job(1024, 1024, text_kv=True), "float16")


def test_sdxl_has_105_units_of_at_most_94_mib(sdxl):
    unet = sdxl["unet"]
    assert len(unet.stream) == 105
    assert 93 * MIB < max(unit.n_bytes for unit in unet.stream) < 94 * MIB
    names = [unit.name for unit in unet.stream]
    assert len(set(names)) == 105
    # registered the other way round
    assert names.index("unet.mid_block.resnets.0") < names.index("unet.up_blocks.0.resnets.0")
    # everything is in a unit or is a projection of the text
    projections = unet.units[-unet.text_chunks :]
    assert sum(unit.n_bytes for unit in projections) == 650 * MIB
    assert sum(unit.n_bytes for unit in unet.stream) + 650 * MIB == unet.n_bytes
    assert [len(sdxl[name].stream) for name in ("text_encoder", "text_encoder_2")] == [14, 36]
    assert not sdxl["vae"].stream


def test_kept_keys_and_values_of_the_text(sdxl):
    # 2 predictions × 77 tokens × 2 bytes × keys and values of 60 layers of 1280 and 10 of 640
    assert sdxl["unet"].kv_bytes == 2 * 77 * 2 * 2 * (60 * 1280 + 10 * 640)
    description = architecture("random:sdxl")
    asked_not_to = _profile(description, Job(1024, 1024), "float16")["unet"]
    assert (asked_not_to.text_chunks, asked_not_to.kv_bytes) == (0, 0)
    assert sum(unit.n_bytes for unit in asked_not_to.stream) == sdxl["unet"].n_bytes


def test_operations_of_a_step(sdxl):
    # 13.54 TFLOP, counted on the card's own kernels
    assert sum(unit.flops for unit in sdxl["unet"].stream) / 1e12 == pytest.approx(13.54, rel=0.01)


def test_a_unit_is_one_range_of_its_chunk(sdxl):
    for component in sdxl.values():
        ends = {}
        for unit in component.stream:
            # in order of execution, without gaps
            assert unit.offset == ends.get(unit.chunk, 0)
            ends[unit.chunk] = unit.offset + unit.n_bytes
        for chunk, end in ends.items():
            assert end <= component.units[chunk].n_bytes


def _plain():
    pipe = load("random:sdxl-tiny", dtype="fp32")
    return pipe, architecture("random:sdxl-tiny")


def _lora():
    from peft import LoraConfig

    pipe, _ = _plain()
    pipe.unet.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_v", "conv1"]))
    return pipe, describe_pipeline(pipe)


def _ip_adapter():
    source = "random:ip-adapter"
    pipe = load("random:sd15-tiny", dtype="fp32")
    described = with_ip_adapters(architecture("random:sd15-tiny"), [source])
    load_ip_adapters(pipe, [(source, 0.6)], described)
    return pipe, described


def _controlnet():
    from diffusers import StableDiffusionXLControlNetPipeline

    pipe, description = _plain()
    described = with_controlnets(description, ["random:controlnet"], "text")
    net = load_controlnet("random:controlnet", described.components["controlnet"], torch.float32)
    parts = {**pipe.components, "controlnet": net, "add_watermarker": False}
    return StableDiffusionXLControlNetPipeline(**parts), described


@pytest.mark.parametrize(
    "make", [_plain, _lora, _ip_adapter, _controlnet], ids=["plain", "lora", "ip", "controlnet"]
)
def test_meta_and_live_split_alike(make, monkeypatch):
    monkeypatch.setattr(stream_order, "STREAM_BYTES", 200 << 10)
    profiler._traced.cache_clear()
    try:
        pipe, description = make()
        job = Job(64, 64, text_kv=True)
        live = pipeline_models(pipe)
        with_weights = _profile(description, job, "float32", live)
        without = _profile(description, job, "float32")
    finally:
        profiler._traced.cache_clear()
    assert with_weights == without
    unet = without["unet"]
    assert len(unet.stream) > 50
    assert unet.text_chunks == 1
    # what the executor finds is what was planned
    order, text = stream_order.order_of(pipe.unet)
    found = layout("unet", pipe.unet, order, text)
    assert found.units == unet.stream
    assert found.text_chunks == unet.text_chunks
    names = [name for group in found.groups for name, _ in group]
    assert sorted(names) == sorted(name for name, _ in weight_tensors(pipe.unet))
    if make is _controlnet:
        assert without["controlnet"].stream
    else:
        assert "controlnet" not in without


class _Model(nn.Module):
    """Layers that are called once, twice, never, and with tied weights."""

    def __init__(self):
        super().__init__()
        self.once, self.twice, self.never = (nn.Linear(8, 8) for _ in range(3))
        self.tied, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.other.weight = self.tied.weight
        self.scale = nn.Parameter(torch.ones(8))
        self.first = nn.Linear(8, 8)

    def forward(self, x):
        x = self.once(self.first(x)) * self.scale
        return self.other(self.tied(self.twice(self.twice(x))))


def test_only_what_runs_once_and_alone_can_be_streamed(monkeypatch):
    monkeypatch.setattr(stream_order, "STREAM_BYTES", 1 << 10)
    model = _Model()
    trace = UnitTrace({"unet": model})
    with trace.watch():
        for _ in range(2):
            model(torch.zeros(1, 8))
    orders = trace.orders()
    assert [path for path, _ in orders["unet"]] == ["first", "once", "tied", "other"]
    found = layout("unet", model, orders["unet"])
    assert [unit.name for unit in found.units] == ["unet.first", "unet.once"]
    names = [name for group in found.groups for name, _ in group]
    assert sorted(names) == sorted(name for name, _ in weight_tensors(model))
    assert not any(stream_order.CALL in module.__dict__ for module in model.modules())


def test_a_compiled_part_is_one_unit_or_none(monkeypatch):
    monkeypatch.setattr(stream_order, "STREAM_BYTES", 1 << 10)
    model = nn.ModuleDict({"a": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 32))})
    assert [path for path, _ in stream_modules(model)] == ["a.0", "a.1"]

    def compiled(*args):
        return None

    setattr(compiled, stream_order.COMPILED, compiled)
    model["a"].__dict__[stream_order.CALL] = compiled
    assert stream_modules(model) == []
