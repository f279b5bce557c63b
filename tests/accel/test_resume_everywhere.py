"""Memory refused at every unit of every phase, in the first, a middle and the last call of it.

One pipeline that has all phases draws from a picture. Wherever memory is refused, that model's call
is repeated, once, and the picture has the same bits. A seeded few of the places are tried each
time, all of them among the slow tests.
"""

import random

import pytest
import torch
from diffusers import AutoPipelineForImage2Image
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode

from sdx_accel.runtime import budget_session, profiler, stream_order
from sdx_accel.runtime.checkpoints import load
from sdx_accel.runtime.executor import Executor
from sdx_patches.vae import bands_of

from .stream_case import Early, streaming

MESSAGE = "CUDA out of memory. Tried to allocate 32.00 MiB. GPU 0 has a total capacity of 8 GiB"
STEPS = 3
KIB = 1 << 10
#: calls of a model in a picture: a prompt and what it is not to be, the steps, the coder once
CALLS = {"text_encoder": 2, "text_encoder_2": 2, "unet": STEPS, "encoder": 1, "decoder": 1}
PHASES = {"unet": "denoise", "encoder": "encode", "decoder": "decode"}
#: the phases with weights of their own to stream
STREAMED = ("text", "denoise")
# how many places of each kind are tried every time
FEW = 2


@pytest.fixture(scope="module", autouse=True)
def small_units():
    """Units of at most 400 KiB: 70 of them in the tiny UNet, instead of 12."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_order, "STREAM_BYTES", 400 * KIB)
        profiler._traced.cache_clear()
        yield
    profiler._traced.cache_clear()


class _Held:
    """A pipeline held in one way, and the picture that it draws undisturbed."""

    def __init__(self, streamed, bands):
        class Moving(Executor):
            def __init__(self, *args, moves):
                super().__init__(*args, moves=True, copies=Early())

            def hold(self, plan):
                phases = STREAMED if streamed else ()
                super().hold(streaming(plan, self.modules, phases, 3, 2) if streamed else plan)

        base = load("random:sdxl-tiny", dtype="fp32")
        self.pipe = AutoPipelineForImage2Image.from_pipe(base)
        self.pipe.set_progress_bar_config(disable=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(budget_session, "Executor", Moving)
            self.pipe.enable_xattn(vram=8, device="cpu", fused=bands, learn=False)
        self.executor = self.pipe.__dict__["_sdx_budget"].executor
        self.expected = self.run()
        assert bands_of(self.pipe.vae) == ("fast" if bands else None)
        assert len(self.executor.plan.streams) == (len(STREAMED) if streamed else 0)

    def run(self):
        return self.pipe(
            "a red apple", negative_prompt="blurry", image=Image.new("RGB", (64, 64), "red"),
            strength=0.75, num_inference_steps=STEPS + 1, output_type="np",
            generator=torch.Generator().manual_seed(0),
        ).images  # fmt: skip

    def model(self, part):
        vae = self.pipe.vae
        return getattr(vae, part) if hasattr(vae, part) else self.pipe.components[part]

    def units(self, part):
        """The units of a model, as the plan knows them; of the coders, as they would be."""
        return stream_order.stream_modules(self.model(part))


@pytest.fixture(scope="module")
def held():
    """`held(streamed, bands)`, made once for all places that are tried in it."""
    made = {}

    def get(streamed=False, bands=True):
        key = streamed, bands
        if key not in made:
            made[key] = _Held(*key)
        return made[key]

    return get


class _AtUnit:
    """Refuses memory before one call of a unit."""

    def __init__(self, unit, call):
        self.left, self.refusals = call, 0
        self.handle = unit.register_forward_pre_hook(self)

    def __call__(self, *_):
        self.left -= 1
        if self.left == -1:
            self.refusals += 1
            raise torch.OutOfMemoryError(MESSAGE)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.handle.remove()


class _AtConvolution(TorchDispatchMode):
    """Refuses memory at one convolution of a coder, or counts them."""

    def __init__(self, executor, phase, number=-1):
        super().__init__()
        self.executor, self.phase, self.number = executor, phase, number
        self.seen = self.refusals = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        mine = self.executor.phase == self.phase
        if mine and func is torch.ops.aten.convolution.default:
            self.seen += 1
            if self.seen - 1 == self.number:
                self.refusals += 1
                raise torch.OutOfMemoryError(MESSAGE)
        return func(*args, **(kwargs or {}))


def _check(held, refuse, phase, component):
    """Draw with one refusal: what is wrong with the result, or None."""
    calls = []
    handle = held.pipe.unet.register_forward_pre_hook(lambda *_: calls.append(None))
    with refuse:
        picture = held.run()
    handle.remove()
    retries = [(retry.phase, retry.component, retry.rung) for retry in held.executor.retries]
    if refuse.refusals != 1:
        return f"{refuse.refusals} refusals"
    if retries != [(phase, component, 1)]:
        return f"repeated {retries}"
    if not (picture == held.expected).all():
        return "other bits"
    wanted = STEPS + (component == "unet")
    return None if len(calls) == wanted else f"{len(calls)} calls of the UNet"


def _few(places, seed, all_of_them):
    return places if all_of_them else random.Random(seed).sample(places, min(FEW, len(places)))


def _sweep(held, part, call, all_of_them):
    units = held.units(part)
    phase = PHASES.get(part, "text")
    component = "vae" if part in ("encoder", "decoder") else part
    wrong = {}
    for name, unit in _few(units, f"{part} {call}", all_of_them):
        if (what := _check(held, _AtUnit(unit, call), phase, component)) is not None:
            wrong[name] = what
    assert wrong == {}
    return units


_PLACES = [(part, call) for part, calls in CALLS.items() for call in range(calls)]
_STREAMED_PLACES = [(part, call) for part, call in _PLACES if PHASES.get(part, "text") in STREAMED]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("part", "call"), _PLACES)
def test_refused_at_a_unit(held, part, call, every):
    # a coder in bands of rows computes without calling most of its units
    units = _sweep(held(bands=part not in ("encoder", "decoder")), part, call, every)
    least = {"unet": 60, "text_encoder": 3, "text_encoder_2": 3, "encoder": 3, "decoder": 3}
    assert len(units) >= least[part]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("part", "call"), _STREAMED_PLACES)
def test_refused_at_a_unit_while_weights_pass_through_a_ring(held, part, call, every):
    _sweep(held(streamed=True), part, call, every)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("phase", ["encode", "decode"])
def test_refused_at_a_convolution_of_a_coder_in_bands(held, phase, every):
    held = held()
    with _AtConvolution(held.executor, phase) as count:
        assert (held.run() == held.expected).all()
    assert count.seen > 15
    wrong = {}
    for number in _few(range(count.seen), phase, every):
        at = _AtConvolution(held.executor, phase, number)
        if (what := _check(held, at, phase, "vae")) is not None:
            wrong[number] = what
    assert wrong == {}


def test_a_repetition_that_is_wrong_would_be_seen(held):
    held = held()
    _, unit = held.units("unet")[5]
    # by another as well, in the repetition
    with _AtUnit(unit, 1):
        assert "repeated" in _check(held, _AtUnit(unit, 1), "denoise", "unet")
    expected, held.expected = held.expected, held.expected + 1e-7
    assert _check(held, _AtUnit(unit, 1), "denoise", "unet") == "other bits"
    held.expected = expected
    assert _check(held, _AtUnit(unit, STEPS), "denoise", "unet") == "0 refusals"
