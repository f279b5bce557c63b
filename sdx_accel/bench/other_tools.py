"""Offloading packages of others at their best settings, each try in a process of its own.

    python -m sdx_accel.bench.other_tools '{"setting": …, "model": …, "room_gib": …, …}' FILE

A process a try, because they do not come off again: mmgp leaves CUDA as torch's default device,
every module wrapped and transformers unable to load another model, and a model that was refused
memory on its way to the card stays on both sides of it. The packages are optional: nothing imports
them before a setting is called.
"""

import functools
import hashlib
import importlib
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from sdx_accel.bench.cell import StepClock
from sdx_accel.bench.contenders import timed_picture
from sdx_accel.bench.sampler import sampled

__all__ = ["SETTINGS", "digest", "missing", "ready", "run", "save", "smallest"]

GIB = 1 << 30
# what no phase wants more of besides weights: a decode of 1024² in fp16 takes 1.5
WORK_GIB = 2.0
# a try takes some twenty seconds; what takes longer than this hangs
PATIENCE_S = 300.0
# in messages of torch, cuBLAS and cuDNN
NO_ROOM = ("out of memory", "ALLOC_FAILED", "find an engine")


def mmgp(pipe: Any, room_gib: float, *, split: bool, overlap: bool = True) -> None:
    """Its profiles 1 (a whole model at a time) and 2 (parts): all of the host's copy is pinned.

    Profiles 3 to 5 pin less, for hosts with less memory.

    Args:
        pipe: on the CPU.
        room_gib: what torch may take of the card.
        split: hold models to what is left beside activations; else each is loaded whole. Parts of
            a UNet are its down, mid and up blocks, one of them 2.2 GiB.
        overlap: copy the next part while one computes, which holds two of them.
    """
    tool = importlib.import_module("mmgp.offload")
    kinds = importlib.import_module("mmgp").profile_type
    # by name: a plain number is not heeded, and 0 means no limit
    budget = max(256, int((room_gib - WORK_GIB) * 1024))
    tool.profile(
        pipe,
        kinds.HighRAM_LowVRAM if split else kinds.HighRAM_HighVRAM,
        budgets={"*": budget} if split else None,
        asyncTransfers=overlap,
        # only the same arithmetic is compared
        quantizeTransformer=False,
        convertWeightsFloatTo=None,
    )


def dynamic_offloader(pipe: Any, room_gib: float, *, way: str) -> None:
    """diffusers-dynamic-offloader without its native allocator, which needs a build of its own.

    Args:
        pipe: on the CPU.
        room_gib: what torch may take of the card.
        way: "auto", one call as its guide has it; "streamed", linear layers and convolutions of the
            UNet are copied when they run; "kept", convolutions stay on the card, and as many
            transformer blocks as fit. In the last two the rest is diffusers' group offloading as
            the package sets it up, but with memory that is pinned once.
    """
    import torch

    tool = importlib.import_module("diffusers_dynamic_offloader")
    common = {"execution_device": "cuda:0", "use_environment": False}
    if way == "auto":
        tool.enable_pipeline_offload(pipe, preset="auto", **common)
        return
    for name in ("text_encoder", "text_encoder_2", "vae"):
        tool.enable_offload(
            getattr(pipe, name),
            component=name,
            route="diffusers_group_offload",
            offload_type="leaf_level",
            use_stream=True,
            record_stream=True,
            group_low_cpu_mem_usage=False,
            **common,
        )
    options: dict[str, Any] = {
        "execution_mode": "linear_runtime",
        "linear_convolution_offload": way == "streamed",
        "pin_cpu_memory": True,
        "pin_cpu_workers": 4,
        "allow_pin_memory_fallback": False,
    }
    if way == "kept":
        kept = sum(
            parameter.nbytes
            for module in pipe.unet.modules()
            if not isinstance(module, torch.nn.Linear)
            for parameter in module.parameters(recurse=False)
        )
        options |= {
            # convolutions that are not streamed have to be there, whatever their size
            "small_tensor_threshold_bytes": 1 << 40,
            "resident_module_patterns": (r"\.transformer_blocks\.\d+$",),
            "resident_module_selection": "spread",
            "resident_module_budget_gb": max(0.0, room_gib - WORK_GIB - kept / GIB),
        }
    config = tool.DynamicOffloadConfig(**options)
    tool.enable_offload(
        pipe.unet, component="unet", route="dynamic_offload", config=config, **common
    )


PACKAGES = ("mmgp", "diffusers_dynamic_offloader")
#: each begins with its package, and is called with a pipeline and the room in GiB
SETTINGS: dict[str, Callable[[Any, float], None]] = {
    # the likeliest of each first: a run that is cut short has them
    "diffusers_dynamic_offloader, streamed": functools.partial(dynamic_offloader, way="streamed"),
    "mmgp, parts": functools.partial(mmgp, split=True, overlap=False),
    "mmgp, whole models": functools.partial(mmgp, split=False),
    "diffusers_dynamic_offloader, kept": functools.partial(dynamic_offloader, way="kept"),
    "mmgp, parts, async": functools.partial(mmgp, split=True),
    "diffusers_dynamic_offloader, auto": functools.partial(dynamic_offloader, way="auto"),
}


def missing(kind: str) -> Iterator[dict[str, Any]]:
    """A row for each package that will not run, with the reason."""
    for package in PACKAGES:
        absent = importlib.util.find_spec(package) is None
        if absent or kind != "plain":
            why = "not installed" if absent else f"driven for plain pictures only, not {kind}"
            yield {"row": "peer", "peer": package, "why": f"not run: {why}"}


def ready(kind: str) -> list[str]:
    """The settings whose package is there."""
    gone = {row["peer"] for row in missing(kind)}
    return [name for name in SETTINGS if name.split(",")[0] not in gone]


def save(pipe: Any, folder: Path) -> str | None:
    """Write the model for the processes to come; what went wrong, or None."""
    try:
        pipe.save_pretrained(folder)
    except (OSError, RuntimeError, ValueError) as error:
        return f"not run: the model was not saved: {_said(error)}"
    return None


def smallest(cell: dict[str, Any], budgets: tuple[float, ...], outside: int) -> dict[str, Any]:
    """The row of a setting: the smallest of the budgets that it works with.

    Args:
        cell: what `run` takes, but the room.
        budgets: GiB.
        outside: bytes that CUDA holds beside torch, which count for everyone.
    """
    row = {"row": "peer", "peer": cell["setting"], "size": cell["size"]}
    for vram in sorted(budgets):
        found = _try({**cell, "room_gib": vram - outside / GIB})
        if "s_per_step" in found:
            return row | found | {"vram": vram}
        if any(words in found["why"] for words in NO_ROOM):
            found["why"] = f"does not fit {vram:g} GiB"
        if row.get("why") == found["why"]:
            # not for lack of memory, and more of it does not help
            break
        row |= found
    return row


def _try(cell: dict[str, Any]) -> dict[str, Any]:
    """`run` in a process of its own, and the driver's peak over what the card held before."""
    seen: dict[str, Any] = {}
    sampling = sampled(seen) if cell["device"] == "cuda" else nullcontext()
    with tempfile.TemporaryDirectory() as name:
        result = Path(name) / "try.json"
        command = [sys.executable, "-m", __name__, json.dumps(cell), str(result)]
        try:
            with sampling:
                child = subprocess.run(
                    command, capture_output=True, text=True, check=False, timeout=PATIENCE_S
                )
        except subprocess.TimeoutExpired:
            return {"why": f"took longer than {PATIENCE_S:g} s"}
        if not result.exists():
            last = (child.stderr.strip().splitlines() or ["no word"])[-1]
            return {"why": f"ended with {child.returncode}: {last}"[:300]}
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    if seen:
        found["driver_peak_gib"] = (seen["peak"] - seen["idle"]) / GIB
    return found


def _said(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


def run(cell: dict[str, Any]) -> dict[str, Any]:
    """Two pictures of one setting; the second is timed. Whatever goes wrong becomes "why"."""
    import torch

    from sdx_accel.runtime import checkpoints

    try:
        pipe = checkpoints.load(cell["model"], dtype=cell["dtype"])
        pipe.set_progress_bar_config(disable=True)
        if cell["device"] == "cuda":
            total = torch.cuda.mem_get_info()[1]
            room = max(cell["room_gib"] * GIB, 1 << 20)
            torch.cuda.set_per_process_memory_fraction(min(1.0, room / total))
        SETTINGS[cell["setting"]](pipe, cell["room_gib"])
        clock = StepClock(torch, cell["device"])
        timing = {"size": cell["size"], "steps": cell["steps"], "guidance": cell["guidance"]}
        timed_picture(pipe, clock, 0, **timing)
        latents, seconds, whole = timed_picture(pipe, clock, 1, **timing)
        if not bool(torch.isfinite(latents).all()):
            return {"why": "no picture: its latents are not finite"}
        modules = [part for part in pipe.components.values() if hasattr(part, "parameters")]
        weights = [weight for module in modules for weight in module.parameters()]
        pinned = sum(w.nbytes for w in weights if w.device.type == "cpu" and w.is_pinned())
    except Exception as error:  # a foreign package may raise anything; the row says what
        return {"why": _said(error)}
    return {
        "s_per_step": seconds,
        "s_per_picture": whole,
        "pinned_gib": pinned / GIB,
        "latents_sha256": digest(latents),
    }


def digest(latents: Any) -> str:
    """Equal for equal values: whether two tools compute the same picture."""
    return hashlib.sha256(latents.float().numpy().tobytes()).hexdigest()[:16]


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(run(json.loads(sys.argv[1]))), encoding="utf-8")
