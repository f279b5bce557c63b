"""Memory refused inside a model's call: the call is repeated, and the picture is the same."""

import dataclasses
import weakref
from itertools import pairwise

import pytest
import torch
from diffusers import EulerAncestralDiscreteScheduler, StableDiffusionXLImg2ImgPipeline

import sdx_accel  # noqa: F401  (attaches the methods)
from sdx_accel.errors import BudgetExceeded
from sdx_accel.runtime import budget_session
from sdx_accel.runtime.checkpoints import load
from sdx_accel.runtime.enforce import NoEnforcer
from sdx_accel.runtime.executor import Executor
from sdx_accel.runtime.held import hold_models
from sdx_accel.runtime.recovery import requested_bytes
from sdx_patches.vae import bands_of

MESSAGE = "CUDA out of memory. Tried to allocate 96.00 MiB. GPU 0 has a total capacity of 8 GiB"
STEPS = 3


@pytest.fixture(scope="module")
def loaded():
    pipe = load("random:sdxl-tiny", dtype="fp32")
    pipe.set_progress_bar_config(disable=True)
    pipe.scheduler = EulerAncestralDiscreteScheduler.from_config(pipe.scheduler.config)
    return pipe


@pytest.fixture(scope="module")
def expected(loaded):
    """The picture of an undisturbed run with all weights in place."""
    loaded.enable_xattn(attention_op="torch")
    picture = _run(loaded)
    loaded.disable_xattn()
    return picture


@pytest.fixture
def pipe(loaded, expected, monkeypatch):
    """A held pipeline whose units move on the CPU as they would to a card."""

    class Moving(Executor):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **{**kwargs, "moves": True})

    monkeypatch.setattr(budget_session, "Executor", Moving)
    loaded.enable_xattn(vram=8, device="cpu", attention_op="torch")
    yield loaded
    loaded.disable_xattn()


def _run(pipe, steps=STEPS, **arguments):
    generator = torch.Generator().manual_seed(0)
    arguments = {"height": 64, "width": 64, "output_type": "np", **arguments}
    return pipe("a red apple", num_inference_steps=steps, generator=generator, **arguments).images


def _executor(pipe):
    return pipe.__dict__["_sdx_budget"].executor


def _middle(half):
    """The attention of a half of the VAE: the one layer that bands of rows call as it is."""
    return half.mid_block.attentions[0]


class _Refuse:
    """A forward pre-hook that refuses memory at chosen calls of a module, counted from 0."""

    def __init__(self, module, *calls, error=torch.OutOfMemoryError):
        self.calls, self.refused, self.error = 0, set(calls), error
        self.handle = module.register_forward_pre_hook(self)

    def __call__(self, module, args):
        self.calls += 1
        if self.calls - 1 in self.refused:
            raise self.error(MESSAGE)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.handle.remove()


def _parts(module):
    """A model's stages in order of registration: its blocks, and what lies beside them."""
    stages = []
    for child in module.children():
        inner = list(child.children())
        split = isinstance(child, torch.nn.ModuleList) or len(inner) == 3
        stages += inner if split else [child]
    return [stage for stage in stages if any(True for _ in stage.parameters())]


@pytest.mark.parametrize("call", range(STEPS))
def test_out_of_memory_at_a_step_gives_the_same_picture(pipe, expected, call):
    executor, moved = _executor(pipe), []
    handle = pipe.unet.register_forward_pre_hook(lambda *_: moved.append(executor.moved_bytes))
    with _Refuse(pipe.unet) as whole, _Refuse(_parts(pipe.unet)[-1], call) as inner:
        assert (_run(pipe) == expected).all()
    handle.remove()
    # between the refused call and its repetition all of the UNet left and came back
    weights = sum(unit.n_bytes for unit in executor._units["unet"])
    assert [b - a >= weights for a, b in pairwise(moved)] == [i == call for i in range(STEPS)]
    assert whole.calls == inner.calls == STEPS + 1
    (retry,) = executor.retries
    assert (retry.phase, retry.component, retry.rung) == ("denoise", "unet", 1)
    assert retry.requested == 96 << 20


@pytest.mark.parametrize("name", ["unet", "text_encoder", "text_encoder_2"])
def test_out_of_memory_at_every_unit(pipe, name):
    """Each stage refuses once in a model's call: it returns what it returns undisturbed."""
    module = pipe.components[name]
    inputs = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(module), "forward", _recording(type(module).forward, inputs))
        _run(pipe, 1, output_type="latent")
    args, kwargs, wanted = inputs[-1]
    executor = _executor(pipe)
    parts = _parts(module)
    assert len(parts) >= 3
    for part in parts:
        executor.retries = []
        with torch.no_grad(), _Refuse(part, 0):
            assert torch.equal(_first(module(*args, **kwargs)), wanted)
        assert len(executor.retries) == 1
        assert all(unit.loaded for unit in executor._units[name])


def _first(result):
    return result[0]


def _recording(forward, inputs):
    def record(self, *args, **kwargs):
        result = forward(self, *args, **kwargs)
        inputs.append((args, kwargs, _first(result)))
        return result

    return record


def test_out_of_memory_in_encode_of_a_picture(pipe):
    from PIL import Image

    other = StableDiffusionXLImg2ImgPipeline.from_pipe(pipe)
    other.set_progress_bar_config(disable=True)
    pipe.disable_xattn()
    other.enable_xattn(attention_op="torch")
    arguments = {"image": Image.new("RGB", (64, 64), "red"), "height": None, "width": None}
    wanted = _run(other, 4, **arguments)
    other.enable_xattn(vram=8, device="cpu", attention_op="torch")
    with _Refuse(_middle(other.vae.encoder), 0), _Refuse(_middle(other.vae.decoder), 0):
        assert (_run(other, 4, **arguments) == wanted).all()
    assert [r.phase for r in _executor(other).retries] == ["encode", "decode"]
    other.disable_xattn()


def test_the_next_refusal_takes_the_next_rung(pipe, expected):
    executor = _executor(pipe)
    asked = []

    def replan(phase, more):
        asked.append((phase, more))
        return dataclasses.replace(executor.plan, notes=("spares more",))

    executor.replan = replan
    with _Refuse(pipe.unet, 0, 1, 3):
        assert (_run(pipe) == expected).all()
    assert [retry.rung for retry in executor.retries] == [1, 2, 3]
    assert asked == [("denoise", round(1.1 * (96 << 20))), ("denoise", 2 * (96 << 20))]
    assert executor.plan.notes == ("spares more",)
    # another picture begins at the foot of the ladder
    with _Refuse(pipe.unet, 0):
        _run(pipe, 1, output_type="latent")
    assert [retry.rung for retry in executor.retries] == [1]


def test_the_ladder_ends_with_both_plans(pipe):
    executor = _executor(pipe)
    held = executor.plan
    smaller = dataclasses.replace(held, notes=("second",))
    plans = iter([smaller, dataclasses.replace(held, feasible=False)])
    executor.replan = lambda phase, more: next(plans)
    with _Refuse(pipe.unet, *range(9)) as whole, pytest.raises(BudgetExceeded) as refusal:
        _run(pipe)
    assert whole.calls == 3
    assert refusal.value.plans[0].notes == held.notes
    assert not refusal.value.plans[1].feasible
    assert "denoise: unet was refused 96 MiB" in str(refusal.value)
    # nothing of the exceptions on the way is left, and the next picture runs
    assert refusal.value.__context__ is None
    executor.replan = None
    _run(pipe, 1, output_type="latent")


def test_a_decode_ends_in_bands_of_rows(pipe, expected):
    _executor(pipe).replan = None
    with _Refuse(_middle(pipe.vae.decoder), 0, 1):
        close = _run(pipe)
    assert [retry.rung for retry in _executor(pipe).retries] == [1, 4]
    assert bands_of(pipe.vae) == "low"
    assert abs(close - expected).max() < 1e-4
    assert "bands" in str(_executor(pipe).retries[-1])
    # bands belong to the plan: the next picture is as it was planned
    assert (_run(pipe) == expected).all()
    assert bands_of(pipe.vae) == "fast"


def test_a_refusal_while_weights_are_loaded(pipe, expected, monkeypatch):
    executor = _executor(pipe)
    load_units, calls = executor._load, []

    def refuse(units):
        if executor.phase is None and calls.count("refused") < 1 and units:
            load_units(units[:1])
            calls.append("refused")
            raise torch.OutOfMemoryError(MESSAGE)
        load_units(units)

    monkeypatch.setattr(executor, "_load", refuse)
    assert (_run(pipe) == expected).all()
    assert calls == ["refused"]
    assert executor.retries[0].phase == "text"


def test_a_refusal_in_the_middle_of_the_vaes_cast(pipe, monkeypatch):
    executor = _executor(pipe)
    before = {n: p.clone() for n, p in pipe.vae.named_parameters()}
    to, refused = torch.nn.Module.to, []

    def half(module, *args, **kwargs):
        if module is pipe.vae and not refused:
            refused.append(to(module.decoder, *args, **kwargs))
            raise torch.OutOfMemoryError(MESSAGE)
        return to(module, *args, **kwargs)

    monkeypatch.setattr(torch.nn.Module, "to", half)
    pipe.vae.to(dtype=torch.float64)
    assert {p.dtype for p in pipe.vae.parameters()} == {torch.float64}
    pipe.vae.to(dtype=torch.float32)
    assert all(torch.equal(before[n], p) for n, p in pipe.vae.named_parameters())
    assert len(executor.retries) == 1


def test_a_cast_vae_is_cast_again_after_the_next_plan(pipe):
    executor = _executor(pipe)
    plans = iter(dataclasses.replace(executor.plan, notes=(str(i),)) for i in range(3))
    executor.replan = lambda phase, more: next(plans)
    latents = torch.full((1, 4, 8, 8), 0.5, dtype=torch.float64)
    with torch.no_grad():
        pipe.vae.to(dtype=torch.float64)
        wanted = pipe.vae.decode(latents).sample
        with _Refuse(_middle(pipe.vae.decoder), 0, 1, 2):
            assert torch.equal(pipe.vae.decode(latents).sample, wanted)
        pipe.vae.to(dtype=torch.float32)
    assert wanted.dtype == torch.float64
    assert [retry.rung for retry in executor.retries] == [1, 2, 3]


def test_failed_pinning_and_other_errors_are_not_out_of_memory(pipe):
    message = "CUDA error: out of memory"
    with (
        _Refuse(pipe.unet, 0, error=lambda _: RuntimeError(message)) as whole,
        pytest.raises(RuntimeError, match=message) as error,
    ):
        _run(pipe)
    assert not isinstance(error.value, BudgetExceeded)
    assert whole.calls == 1
    assert not _executor(pipe).retries


def test_memory_refused_between_the_models_carries_the_plans(pipe):
    def callback(*_):
        raise torch.OutOfMemoryError(MESSAGE)

    executor = _executor(pipe)
    held, larger = executor.plan, dataclasses.replace(executor.plan, notes=("spares more",))
    executor.replan = lambda phase, more: larger if phase == "denoise" else None
    with pytest.raises(BudgetExceeded, match="denoise: the pipeline itself") as refusal:
        _run(pipe, callback_on_step_end=callback)
    assert [plan.notes for plan in refusal.value.plans] == [held.notes, larger.notes]


def test_no_activation_survives_the_failure(pipe, expected):
    alive, counts = [], []

    def hold(module, args):
        activation = torch.ones(3)
        alive.append(weakref.ref(activation))
        counts.append(sum(reference() is not None for reference in alive))
        if len(alive) == 1:
            # as where an exception is kept by the frame that it came through
            cycle = [activation]
            cycle.append(cycle)
            raise torch.OutOfMemoryError(MESSAGE)

    handle = _parts(pipe.unet)[-1].register_forward_pre_hook(hold)
    assert (_run(pipe) == expected).all()
    handle.remove()
    assert counts == [1] * (STEPS + 1)


def test_compiled_code_holds_no_ladder():
    """What a compiler traces is the model's own call, in one graph."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    executor = Executor({"unet": model}, torch.device("cpu"), NoEnforcer(), moves=False)
    undo = hold_models(executor)
    compiled = torch.compile(lambda x: model[1](model[0](model(x))), backend="eager")
    x = torch.ones(2, 4)
    executor.phase = "denoise"
    assert torch.equal(compiled(x), model[1](model[0](model(x))))
    undo()
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        ("Tried to allocate 2.50 GiB.", 5 << 29),
        ("Tried to allocate 20.00 MiB.", 20 << 20),
        ("Tried to allocate 512 bytes", 512),
        ("no figure", 64 << 20),
    ],
)
def test_the_refused_bytes_are_read_off_the_message(message, wanted):
    assert requested_bytes(message) == wanted
