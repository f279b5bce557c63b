"""Scheduler names and dtype choice."""

import pytest
import torch

from sdx_accel.errors import RefusedError
from sdx_accel.runtime import checkpoints
from sdx_accel.runtime.architectures import architecture
from sdx_accel.runtime.checkpoints import load
from sdx_accel.runtime.dtypes import dtype_for
from sdx_accel.runtime.schedulers import SCHEDULERS, make_scheduler


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("spec", ["random:sdxl", "random:sd15"])
def test_every_name_makes_its_class_and_keeps_the_noise_schedule(name, spec):
    config = architecture(spec).scheduler[1]
    scheduler = make_scheduler(name.upper(), config)
    class_name, changes = SCHEDULERS[name]
    assert type(scheduler).__name__ == class_name
    assert scheduler.config.beta_end == config["beta_end"]
    assert scheduler.config.beta_schedule == "scaled_linear"
    assert all(scheduler.config[key] == value for key, value in changes.items())
    scheduler.set_timesteps(4)
    assert len(scheduler.timesteps) >= 4


@pytest.mark.parametrize("name", ["ddim", "euler-a", "dpm++", "unipc", "lcm", "pndm", "heun"])
def test_schedulers_make_pictures(name):
    pipe = load("random:sdxl-tiny", dtype="fp32", device="cpu", scheduler=name)
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    out = pipe(
        "x", height=64, width=64, num_inference_steps=3, generator=generator, output_type="pt"
    )
    assert out.images.isfinite().all()
    assert out.images.std() > 0.01


def test_unknown_scheduler_lists_the_names_before_anything_loads(monkeypatch):
    monkeypatch.setattr(checkpoints, "build_random", lambda *a: pytest.fail("work was started"))
    with pytest.raises(RefusedError, match=r"did you mean 'euler'\?") as caught:
        load("random:sdxl-tiny", device="cpu", scheduler="eulr")
    assert all(name in str(caught.value) for name in SCHEDULERS)


def test_flow_models_keep_their_scheduler():
    with pytest.raises(RefusedError, match="flow-matching"):
        make_scheduler("ddim", {"_class_name": "FlowMatchEulerDiscreteScheduler"})


@pytest.fixture
def card(monkeypatch):
    """Pretend that there is one CUDA device of a given compute capability."""

    def pretend(capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Card X")

    return pretend


@pytest.mark.parametrize(
    ("capability", "requested", "expected", "says"),
    [
        ((9, 0), "auto", torch.float16, None),
        ((9, 0), "bf16", torch.bfloat16, None),
        ((7, 5), "auto", torch.float16, None),
        ((7, 5), "bf16", torch.float16, "Card X has no bf16: running in fp16"),
        ((7, 0), torch.bfloat16, torch.float16, "no bf16"),
        ((6, 1), "auto", torch.float32, None),
        ((6, 1), "fp16", torch.float16, None),
        ((8, 6), "fp32", torch.float32, None),
    ],
)
def test_case_044_dtype_on_a_card(card, capability, requested, expected, says):
    card(capability)
    for device in (None, "auto", "cuda", "cuda:0", torch.device("cuda")):
        dtype, note = dtype_for(device, requested)
        assert dtype is expected
        assert note is None if says is None else says in note and "\n" not in note


@pytest.mark.parametrize(
    ("requested", "expected"),
    [("auto", torch.float32), ("bf16", torch.bfloat16), ("fp32", torch.float32)],
)
def test_dtype_on_the_cpu(requested, expected):
    assert dtype_for("cpu", requested) == (expected, None)


def test_fp16_without_a_gpu_says_what_runs_instead():
    assert dtype_for("cpu", "fp16") == (
        torch.float32,
        "no GPU for fp16: running in fp32 on the CPU",
    )


@pytest.mark.parametrize(
    ("device", "requested", "expected"),
    [("cpu", "int8", "known: auto"), ("gpu", "auto", "unknown device"), ("cuda:7", "auto", "7")],
)
def test_unknown_dtype_or_device_is_refused(card, device, requested, expected):
    card((8, 0))
    with pytest.raises(RefusedError, match=expected):
        dtype_for(device, requested)


def test_cuda_asked_where_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RefusedError, match="--device cpu"):
        dtype_for("cuda", "auto")
