"""Offloading packages of others in the streaming benchmark: what they are asked for, what fails."""

import importlib.util
import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from sdx_accel.bench import other_tools, streaming
from sdx_accel.bench.cell import StepClock
from sdx_accel.bench.contenders import timed_picture
from sdx_accel.bench.streaming import parser
from sdx_accel.runtime import checkpoints

MMGP, DYNAMIC = other_tools.PACKAGES
WHOLE = "mmgp, whole models"
LINE = ["--tiny", "--sizes", "64", "--budgets", "2,1", "--peers"]
CELL = {
    "setting": WHOLE,
    "model": "random:sdxl-tiny",
    "dtype": "fp32",
    "device": "cpu",
    "size": 64,
    "steps": 2,
    "guidance": 5.0,
    "room_gib": 4.0,
}
KINDS = SimpleNamespace(HighRAM_HighVRAM=1, HighRAM_LowVRAM=2)


@pytest.fixture
def mmgp(monkeypatch):
    """A module in mmgp's place; its calls are kept, and `then` does what a test wants of it."""
    calls = []
    module, package = ModuleType("mmgp.offload"), ModuleType("mmgp")
    module.then = lambda pipe: None

    def profile(pipe, number, **options):
        calls.append({"number": number, **options})
        module.then(pipe)

    module.profile, package.profile_type, module.calls = profile, KINDS, calls
    monkeypatch.setitem(sys.modules, "mmgp", package)
    monkeypatch.setitem(sys.modules, "mmgp.offload", module)
    return module


@pytest.fixture
def on_disk(tmp_path, monkeypatch):
    """mmgp as a package that other processes find too; returns a writer of its `profile`."""
    folder = tmp_path / "site" / "mmgp"
    folder.mkdir(parents=True)
    kinds = "from types import SimpleNamespace\n"
    kinds += "profile_type = SimpleNamespace(HighRAM_HighVRAM=1, HighRAM_LowVRAM=2)\n"
    (folder / "__init__.py").write_text(kinds, encoding="utf-8")
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.setenv("PYTHONPATH", ":".join([str(folder.parent), *sys.path]))
    monkeypatch.setenv("OUT", str(tmp_path))

    def write(body):
        text = f"import os\ndef profile(pipe, number, **options):\n    {body}\n"
        (folder / "offload.py").write_text(text, encoding="utf-8")

    return write


def bench(monkeypatch):
    """A benchmark on the CPU with one setting of one package."""
    monkeypatch.setattr(other_tools, "SETTINGS", {WHOLE: other_tools.SETTINGS[WHOLE]})
    found = streaming.Bench(parser().parse_args(LINE))
    return found, checkpoints.load("random:sdxl-tiny", dtype="fp32")


def test_packages_that_are_not_there_are_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    rows = list(other_tools.missing("plain"))
    assert [row["peer"] for row in rows] == [MMGP, DYNAMIC]
    assert {row["why"] for row in rows} == {"not run: not installed"}
    assert other_tools.ready("plain") == []


def test_one_package_without_the_other(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True if name == MMGP else None)
    assert [row["peer"] for row in other_tools.missing("plain")] == [DYNAMIC]
    names = other_tools.ready("plain")
    assert len(names) == 3
    assert all(name.startswith("mmgp, ") for name in names)


def test_a_lora_or_a_controlnet_is_not_theirs_to_run(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    assert all("not lora" in row["why"] for row in other_tools.missing("lora"))
    assert other_tools.ready("lora") == []
    assert len(other_tools.ready("plain")) == len(other_tools.SETTINGS)


@pytest.mark.parametrize(
    ("setting", "room", "number", "budgets", "overlap"),
    [
        (WHOLE, 6.0, 1, None, True),
        ("mmgp, parts, async", 5.5, 2, {"*": 3584}, True),
        ("mmgp, parts", 4.0, 2, {"*": 2048}, False),
        # no budget at all would be no limit
        ("mmgp, parts", 1.0, 2, {"*": 256}, False),
    ],
)
def test_mmgp_is_asked_for(mmgp, setting, room, number, budgets, overlap):
    other_tools.SETTINGS[setting](None, room)
    (call,) = mmgp.calls
    assert call["number"] == number
    assert call["budgets"] == budgets
    assert call["asyncTransfers"] is overlap
    assert call["quantizeTransformer"] is False
    assert call["convertWeightsFloatTo"] is None


@pytest.fixture
def dynamic(monkeypatch):
    """A module in the place of diffusers-dynamic-offloader, and a pipeline with a large UNet."""
    module = ModuleType(DYNAMIC)
    module.configs, module.parts, module.pipelines = [], {}, []

    def config(**options):
        module.configs.append(options)
        return options

    def enable_offload(part, component, route, **options):
        module.parts[component] = part, route, options

    def enable_pipeline_offload(pipe, **options):
        module.pipelines.append(options)

    module.DynamicOffloadConfig = config
    module.enable_offload = enable_offload
    module.enable_pipeline_offload = enable_pipeline_offload
    monkeypatch.setitem(sys.modules, DYNAMIC, module)
    with torch.device("meta"):
        unet = torch.nn.ModuleDict(
            {
                # half a GiB and a GiB
                "conv": torch.nn.Conv2d(1 << 13, 1 << 14, 1, bias=False, dtype=torch.float32),
                "linear": torch.nn.Linear(1 << 14, 1 << 14, bias=False, dtype=torch.float32),
            }
        )
    names = ("text_encoder", "text_encoder_2", "vae")
    return module, SimpleNamespace(unet=unet, **{name: name for name in names})


def test_dynamic_offloader_keeps_what_the_budget_leaves(dynamic):
    module, pipe = dynamic
    other_tools.SETTINGS[f"{DYNAMIC}, kept"](pipe, 5.0)
    (config,) = module.configs
    assert config["resident_module_budget_gb"] == 5.0 - other_tools.WORK_GIB - 0.5
    assert config["small_tensor_threshold_bytes"] > 1 << 30
    assert not config["linear_convolution_offload"]
    assert config["pin_cpu_memory"]
    part, route, options = module.parts["unet"]
    assert (part, route, options["config"]) == (pipe.unet, "dynamic_offload", config)
    for name in ("text_encoder", "text_encoder_2", "vae"):
        part, route, options = module.parts[name]
        assert (part, route) == (name, "diffusers_group_offload")
        assert options["use_stream"]
        assert options["group_low_cpu_mem_usage"] is False


def test_dynamic_offloader_keeps_nothing_where_there_is_no_room(dynamic):
    module, pipe = dynamic
    other_tools.SETTINGS[f"{DYNAMIC}, kept"](pipe, 2.25)
    other_tools.SETTINGS[f"{DYNAMIC}, streamed"](pipe, 9.0)
    kept, streamed = module.configs
    assert kept["resident_module_budget_gb"] == 0.0
    assert streamed["linear_convolution_offload"]
    assert "resident_module_budget_gb" not in streamed


def test_dynamic_offloader_in_one_call(dynamic):
    module, pipe = dynamic
    other_tools.SETTINGS[f"{DYNAMIC}, auto"](pipe, 4.0)
    (call,) = module.pipelines
    assert call["preset"] == "auto"
    # what the shell happens to hold is no setting
    assert call["use_environment"] is False
    assert not module.parts


def scripted(monkeypatch, *answers):
    """`smallest` over answers instead of processes; returns its row and the rooms it tried."""
    rooms, left = [], list(answers)

    def attempt(cell):
        rooms.append(cell["room_gib"])
        return dict(left.pop(0))

    monkeypatch.setattr(other_tools, "_try", attempt)
    return other_tools.smallest(CELL, (6.0, 2.0, 4.0), 1 << 29), rooms


DONE = {"s_per_step": 0.5, "s_per_picture": 4.0, "driver_peak_gib": 3.5}


def test_the_smallest_budget_that_works(monkeypatch):
    refused = {"why": "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB"}
    row, rooms = scripted(monkeypatch, refused, DONE)
    assert rooms == [1.5, 3.5]
    assert row["vram"] == 4.0
    assert row["why"] == "does not fit 2 GiB"
    assert row["peer"] == WHOLE
    assert row["driver_peak_gib"] == 3.5


@pytest.mark.parametrize(
    "why",
    ["RuntimeError: CUBLAS_STATUS_ALLOC_FAILED", "AcceleratorError: CUDA error: out of memory"],
)
def test_other_words_for_too_little_memory(monkeypatch, why):
    row, rooms = scripted(monkeypatch, {"why": why}, {"why": why}, {"why": why})
    assert rooms == [1.5, 3.5, 5.5]
    assert row["why"] == "does not fit 6 GiB"
    assert "vram" not in row


def test_a_failure_that_more_memory_does_not_help_is_tried_twice(monkeypatch):
    wrong = {"why": "RuntimeError: weight is on cpu"}
    row, rooms = scripted(monkeypatch, wrong, wrong, DONE)
    assert rooms == [1.5, 3.5]
    assert row["why"] == "RuntimeError: weight is on cpu"
    assert "s_per_step" not in row


def refuse(pipe):
    raise KeyError("no such block\nand more")


def spoil(pipe):
    pipe.unet.conv_out.bias.data.fill_(torch.nan)


@pytest.mark.parametrize(
    ("then", "why"),
    [(refuse, "KeyError: 'no such block\\nand more'"), (spoil, "no picture: its latents are not")],
)
def test_what_goes_wrong_in_a_package_is_a_reason(mmgp, then, why):
    mmgp.then = then
    found = other_tools.run(CELL)
    assert found["why"].startswith(why)
    assert "s_per_step" not in found


def test_the_row_of_a_package_comes_from_its_own_process(on_disk, monkeypatch):
    on_disk("assert number == 1 and os.getppid() == int(os.environ['PARENT'])")
    monkeypatch.setenv("PARENT", str(os.getpid()))
    ours, pipe = bench(monkeypatch)
    *named, row = ours.peers(pipe, 64)
    assert [other["peer"] for other in named] == [DYNAMIC]
    assert row["peer"] == WHOLE
    assert row["vram"] == 1.0
    assert "why" not in row
    assert row["s_per_step"] > 0
    assert "mmgp.offload" not in sys.modules
    # the very model, and the very picture
    pipe.set_progress_bar_config(disable=True)
    clock = StepClock(torch, "cpu")
    latents, _, _ = timed_picture(pipe, clock, 1, size=64, steps=2, guidance=5.0)
    assert row["latents_sha256"] == other_tools.digest(latents)


def test_a_process_that_dies_is_a_reason(on_disk, monkeypatch):
    on_disk("os.write(2, b'gone\\n'); os._exit(7)")
    ours, pipe = bench(monkeypatch)
    ours.options.budgets = (1.0,)
    *_, row = ours.peers(pipe, 64)
    assert row["why"] == "ended with 7: gone"


def test_a_process_that_hangs_is_a_reason(monkeypatch):
    monkeypatch.setattr(other_tools, "PATIENCE_S", 0.1)
    row = other_tools.smallest(CELL, (1.0,), 0)
    assert row["why"] == "took longer than 0.1 s"


def test_a_model_that_cannot_be_written_is_a_reason(on_disk, monkeypatch):
    on_disk("pass")
    ours, pipe = bench(monkeypatch)

    def full(folder):
        raise OSError("No space left on device")

    monkeypatch.setattr(pipe, "save_pretrained", full)
    monkeypatch.setattr(other_tools, "_try", None)
    *_, row = ours.peers(pipe, 64)
    assert row["peer"] == WHOLE
    assert row["why"] == "not run: the model was not saved: OSError: No space left on device"
