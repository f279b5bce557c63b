"""Case 103: many pictures in a row take the memory and the time of the first few."""

import gc
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import sdx_accel  # noqa: F401  (attaches the methods)
from sdx_accel.runtime import budget_session
from sdx_accel.runtime.checkpoints import load
from sdx_accel.runtime.executor import Executor

MIB = 1 << 20
#: three sizes in rotation, and the adapter that is swapped after each round of them
SIZES = ((64, 64), (64, 96), (96, 64))


class Growing(AssertionError):
    """Memory is kept from one round to the next."""


class Watch:
    """Looks at memory after each round; the first two may load and plan.

    Args:
        read: bytes by name, as they are now.
        allowed: how much more than after the second round each may be.
    """

    def __init__(self, read, allowed):
        self.read, self.allowed, self.seen = read, allowed, []

    def look(self):
        gc.collect()
        self.seen.append(self.read())
        if len(self.seen) > 2:
            for name, allowed in self.allowed.items():
                more = self.seen[-1][name] - self.seen[1][name]
                if more > allowed:
                    raise Growing(f"{name}: {more / MIB:.1f} MiB more than after round 2")


def _live_bytes():
    """Bytes of all tensors that are alive, each storage once."""
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.device.type == "cpu":
            # fake tensors, which a compiled model may have left in this process, have no memory
            with suppress(RuntimeError):
                storage = thing.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _resident_bytes():
    """What the system says this process has in memory; 0 where it does not say."""
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * 4096 if status.exists() else 0


def _read_host():
    return {"tensors": _live_bytes(), "resident": _resident_bytes()}


@pytest.fixture
def pipe(monkeypatch):
    class Moving(Executor):
        def __init__(self, *args, moves):
            super().__init__(*args, moves=True)

    monkeypatch.setattr(budget_session, "Executor", Moving)
    loaded = load("random:sdxl-tiny", dtype="fp32")
    loaded.set_progress_bar_config(disable=True)
    loaded.enable_xattn(vram=8, device="cpu", learn=False)
    yield loaded
    loaded.disable_xattn()


def _draw(pipe, seed, size):
    height, width = size
    return pipe(
        f"apple {seed}", height=height, width=width, num_inference_steps=1, output_type="np",
        generator=torch.Generator().manual_seed(seed),
    ).images  # fmt: skip


def _swap_adapter(pipe, number):
    from peft import LoraConfig

    torch.manual_seed(number)
    if getattr(pipe.unet, "peft_config", None):
        pipe.unload_lora_weights()
    else:
        pipe.unet.add_adapter(LoraConfig(r=2 + number % 2, target_modules=["to_q", "to_v"]))


# kept prompts, of which there is a new one in each round: 16 at most
TENSORS = MIB
# a heap has its own mind; one of the tiny model's pictures at a time would be 100 MiB
RESIDENT = 32 * MIB


@pytest.mark.parametrize(
    ("rounds", "sizes", "swap"),
    [
        pytest.param(4, SIZES, 0, id="sizes"),
        pytest.param(6, SIZES[:1], 1, id="adapters"),
        pytest.param(66, SIZES, 11, id="200 pictures", marks=pytest.mark.slow),
    ],
)
def test_case_103_round_after_round_keeps_its_memory(pipe, rounds, sizes, swap):
    watch = Watch(_read_host, {"tensors": TENSORS, "resident": RESIDENT})
    for number in range(1, rounds + 1):
        for size in sizes:
            _draw(pipe, number, size)
        if swap and number % swap == 0:
            _swap_adapter(pipe, number)
        # without an adapter each time
        if number % (2 * swap or 1) == 0:
            watch.look()
    assert len(watch.seen) >= 3
    executor = pipe.__dict__["_sdx_budget"].executor
    assert executor.streamer is None
    assert not executor.retries


def test_case_103_a_leak_would_be_seen(pipe):
    """A picture's latents at 1024², or a hook for each call, are enough."""
    kept = []
    watch = Watch(_read_host, {"tensors": TENSORS, "resident": RESIDENT})
    pipe.unet.register_forward_hook(lambda *_: kept.append(torch.zeros(MIB)))
    _draw(pipe, 0, SIZES[0])
    watch.look()
    _draw(pipe, 1, SIZES[0])
    watch.look()
    _draw(pipe, 2, SIZES[0])
    with pytest.raises(Growing, match=r"tensors: 4\.\d MiB more"):
        watch.look()
    pipe.unet._forward_hooks.clear()


@pytest.mark.gpu
@pytest.mark.parametrize("pictures", [12, pytest.param(100, marks=pytest.mark.slow)])
def test_case_103_on_a_card(pictures):
    gc.collect()
    torch.cuda.empty_cache()
    pipe = load("random:sd15", dtype="fp16")
    pipe.set_progress_bar_config(disable=True)
    pipe.enable_xattn(vram=3.5, device="cuda", learn=False)

    def read():
        reserved = torch.cuda.memory_reserved()
        return {"allocated": torch.cuda.memory_allocated(), "reserved": reserved, **_read_host()}

    watch = Watch(
        read, {"allocated": MIB, "reserved": 35 * MIB, "tensors": 8 * MIB, "resident": 64 * MIB}
    )
    for seed in range(pictures):
        _draw(pipe, seed % 8, (512, 512))
        torch.cuda.synchronize()
        if seed % 2:
            watch.look()
    pipe.disable_xattn()
