"""Our backend in diffusers' attention dispatcher: one model at a time, and the way back."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.models import attention_dispatch as host
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from torch import Tensor, nn

import sdx_patches
from sdx_kernels import registry
from sdx_patches import dispatcher, dispatcher_sites

from .dispatcher_case import attentions, backends, flux, out

BACKENDS = host._AttentionBackendRegistry
NAMES = host.AttentionBackendName


@pytest.fixture(autouse=True)
def _active_backend() -> Iterator[None]:
    """diffusers keeps one active backend for the whole process; leave it as it was."""
    before = BACKENDS._active_backend
    yield
    BACKENDS.set_active_backend(before)


def state(model: nn.Module) -> list[Any]:
    return [
        (id(m.processor), dict(vars(m.processor)), sorted(vars(m)), len(m._forward_pre_hooks),
         len(m._forward_hooks), len(m._forward_hooks_always_called))
        for m in attentions(model)
    ] + [BACKENDS._active_backend]  # fmt: skip


def reasons(model: nn.Module) -> set[str]:
    return {layer.reason for layer in sdx_patches.layers(model)}


def test_registering_twice_extends_the_enumeration_once() -> None:
    first, second = dispatcher.register(), dispatcher.register("auto")
    assert first is second is NAMES("sdx_accel") is NAMES.SDX_ACCEL is NAMES["SDX_ACCEL"]
    assert NAMES._member_names_.count("SDX_ACCEL") == 1
    assert [member for member in NAMES if member.value == "sdx_accel"] == [first]
    assert isinstance(first, NAMES)
    assert BACKENDS.list_backends().count(first) == 1
    assert copy.deepcopy(first) is first
    assert pickle.loads(pickle.dumps(first)) is first


def test_an_operator_has_a_member_of_its_own() -> None:
    torch_only = dispatcher.register("torch")
    assert torch_only is NAMES("sdx_accel_torch") is not dispatcher.register()
    assert pickle.loads(pickle.dumps(torch_only)) is torch_only


def test_a_model_reports_the_process_s_default_that_outlives_disable() -> None:
    model = flux()
    sdx_patches.patch(model, owner="test")
    model.set_attention_backend("sdx_accel")  # diffusers makes it the active one of the process
    sdx_patches.restore(model, owner="test")
    before = registry.launches.total()
    out(model)
    assert registry.launches.total() == before + 3
    assert {layer.running for layer in sdx_patches.layers(model)} == {"sdx_accel"}
    assert all("made it the process's default" in reason for reason in reasons(model))


def test_the_users_own_calls_reach_it() -> None:
    dispatcher.register()
    model, expected = flux(), out(flux())
    before = registry.launches.total()
    model.set_attention_backend("sdx_accel")
    torch.testing.assert_close(out(model), expected, atol=1e-5, rtol=0)
    assert registry.launches.total() == before + 3
    model.reset_attention_backend()
    BACKENDS.set_active_backend(NAMES.NATIVE)
    with host.attention_backend("sdx_accel"):
        out(model)
    assert registry.launches.total() == before + 6
    attentions(model)[0].set_attention_backend("sdx_accel")
    out(model)
    assert registry.launches.total() == before + 7


def test_enabling_reaches_this_model_only_and_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = flux(), flux()
    expected, untouched = out(model), state(other)
    before = state(model)
    sdx_patches.patch(model, owner="a")
    sdx_patches.patch(model, owner="a")
    assert {str(backend.value) for backend in backends(model)} == {"sdx_accel"}
    assert state(other) == untouched
    assert BACKENDS._active_backend is before[-1]
    launched = registry.launches.total()
    out(other)
    assert registry.launches.total() == launched
    torch.testing.assert_close(out(model), expected, atol=1e-5, rtol=0)
    assert registry.launches.total() == launched + 3

    run = dispatcher.attend
    monkeypatch.setattr(
        dispatcher, "attend", lambda *a, **k: (run(*a, **k)[0] + 1e-2, run(*a, **k)[1])
    )
    assert (out(model) - expected).abs().max() > 1e-4
    sdx_patches.restore(model, owner="a")
    assert state(model) == before
    assert torch.equal(out(model), expected)


def test_the_report_names_what_each_layer_ran() -> None:
    model, other = flux(), flux()
    assert reasons(model) == {"not enabled"}
    assert {layer.running for layer in sdx_patches.layers(model)} == {"native"}
    sdx_patches.patch(model, owner="a")
    sdx_patches.patch(other, owner="a", attention_op="reference")
    assert {layer.running for layer in sdx_patches.layers(model)} == {"not run yet"}
    launched = registry.launches.copy()
    out(other)
    assert registry.launches - launched == {"reference": 3}
    assert {layer.running for layer in sdx_patches.layers(model)} == {"not run yet"}
    launched = registry.launches.copy()
    out(model)
    ran = registry.launches - launched
    layers = sdx_patches.layers(model)
    assert ran == {layers[0].running: 3} != {"reference": 3}
    assert [(layer.requested, layer.running) for layer in layers] == [("auto", *ran)] * 3
    assert all("reference" in layer.reason for layer in layers)
    assert {(layer.requested, layer.running) for layer in sdx_patches.layers(other)} == {
        ("reference", "reference")
    }


def test_the_last_owner_s_operator_holds_and_the_former_comes_back() -> None:
    model = flux()
    before = state(model)
    for owner, op in (("a", "torch"), ("b", "reference")):
        sdx_patches.patch(model, owner=owner, attention_op=op)
    out(model)
    assert {layer.running for layer in sdx_patches.layers(model)} == {"reference"}
    sdx_patches.restore(model, owner="b")
    out(model)
    assert {layer.requested for layer in sdx_patches.layers(model)} == {"torch"}
    assert all(layer.running.startswith("sdpa") for layer in sdx_patches.layers(model))
    sdx_patches.restore(model, owner="a")
    assert state(model) == before


def test_a_backend_that_the_user_chose_stays() -> None:
    model = flux()
    attentions(model)[0].set_attention_backend("_native_math")
    attentions(model)[1].processor._attention_backend = "native"
    before = state(model)
    sdx_patches.patch(model, owner="a")
    layers = sdx_patches.layers(model)
    assert [layer.running for layer in layers] == ["_native_math", "native", "not run yet"]
    assert [layer.patched for layer in layers] == [False, False, True]
    assert "'_native_math' was chosen" in layers[0].reason
    sdx_patches.restore(model, owner="a")
    assert state(model) == before


def test_our_own_backend_that_the_user_chose_comes_back() -> None:
    dispatcher.register()
    model = flux()
    for attention in attentions(model):
        attention.set_attention_backend("sdx_accel")
    before = state(model)
    assert all("set_attention_backend('sdx_accel') chose it" in r for r in reasons(model))
    sdx_patches.patch(model, owner="a", attention_op="torch")
    assert {backend.value for backend in backends(model)} == {"sdx_accel_torch"}
    sdx_patches.restore(model, owner="a")
    assert state(model) == before


def test_what_the_user_chooses_afterwards_stays() -> None:
    model = flux()
    sdx_patches.patch(model, owner="a")
    attentions(model)[0].set_attention_backend("_native_math")
    attentions(model)[1].processor._attention_backend = None
    out(model)
    layers = sdx_patches.layers(model)
    assert [layer.running for layer in layers[:2]] == ["_native_math", "native"]
    assert "reset_attention_backend() was called later" in layers[1].reason
    assert [layer.patched for layer in layers] == [False, False, True]
    sdx_patches.restore(model, owner="a")
    assert backends(model) == [NAMES._NATIVE_MATH, None, None]


def test_enabling_again_takes_over_after_a_reset() -> None:
    model = flux()
    before = state(model)
    sdx_patches.patch(model, owner="a")
    model.reset_attention_backend()
    out(model)
    assert not any(layer.patched for layer in sdx_patches.layers(model))
    sdx_patches.patch(model, owner="a")
    assert all(layer.patched for layer in sdx_patches.layers(model))
    sdx_patches.restore(model, owner="a")
    assert backends(model) == [None] * 3
    assert BACKENDS._active_backend is before[-1]


def test_a_processor_that_the_host_installs_gets_it_at_its_first_run() -> None:
    model = flux()
    sdx_patches.patch(model, owner="a")
    fresh = [FluxAttnProcessor() for _ in attentions(model)]
    for attention, processor in zip(attentions(model), fresh, strict=True):
        attention.set_processor(processor)
    assert all("was installed since" in reason for reason in reasons(model))
    launched = registry.launches.total()
    out(model)
    assert registry.launches.total() == launched + 3
    assert all(layer.patched for layer in sdx_patches.layers(model))
    sdx_patches.restore(model, owner="a")
    assert [m.processor for m in attentions(model)] == fresh
    assert all(vars(processor) == {} for processor in fresh)


def test_one_processor_for_all_layers_is_given_back() -> None:
    model, shared = flux(), FluxAttnProcessor()
    model.set_attn_processor(shared)
    sdx_patches.patch(model, owner="a")
    out(model)
    assert all(layer.running != "not run yet" for layer in sdx_patches.layers(model))
    sdx_patches.restore(model, owner="a")
    assert vars(shared) == {}


def test_a_part_of_a_sequence_is_left_alone() -> None:
    model = flux()
    attentions(model)[0].processor._parallel_config = SimpleNamespace()
    sdx_patches.patch(model, owner="a")
    assert "part of the sequence" in sdx_patches.layers(model)[0].reason
    assert backends(model)[0] is None
    assert backends(model)[1] is not None


def test_without_a_dispatcher_everything_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = flux()
    before = state(model)
    monkeypatch.delattr(host, "AttentionBackendName")
    assert not dispatcher.available()
    sdx_patches.patch(model, owner="a")
    assert state(model) == before
    assert all("no attention dispatcher" in reason for reason in reasons(model))


@pytest.mark.parametrize("patched_already", [False, True])
def test_a_failure_half_way_puts_the_backends_back(
    monkeypatch: pytest.MonkeyPatch, patched_already: bool
) -> None:
    model = flux()
    if patched_already:
        sdx_patches.patch(model, owner="first", attention_op="torch")
    before = state(model)
    install, done = dispatcher_sites.install, []

    def failing(attention: nn.Module, session: Any) -> None:
        if len(done) == 2:
            raise OSError("interrupted")
        install(attention, session)
        done.append(attention)

    monkeypatch.setattr(dispatcher_sites, "install", failing)
    with pytest.raises(OSError, match="interrupted"):
        sdx_patches.patch(model, owner="second")
    assert len(done) == 2
    assert state(model) == before


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_is_patched_and_independent(how: str) -> None:
    model = flux()
    sdx_patches.patch(model, owner="a", attention_op="torch")
    expected = out(model)
    twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert torch.equal(out(twin), expected)
    assert {layer.requested for layer in sdx_patches.layers(twin)} == {"torch"}
    sdx_patches.restore(twin, owner="b")
    assert backends(twin) == [None] * 3
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in attentions(twin))
    assert {backend.value for backend in backends(model)} == {"sdx_accel_torch"}
    out(model)
    assert all(layer.running.startswith("sdpa") for layer in sdx_patches.layers(model))


def test_a_pickled_layer_works_where_nobody_has_registered_the_backend() -> None:
    model = flux()
    sdx_patches.patch(model, owner="a", attention_op="torch")
    attention = attentions(model)[1]
    pickled = pickle.dumps(attention)
    member = dispatcher.register("torch")
    del BACKENDS._backends[member], NAMES._value2member_map_[member.value]
    del NAMES._member_map_[member.name]
    NAMES._member_names_.remove(member.name)
    loaded = pickle.loads(pickled)
    again = loaded.processor._attention_backend
    assert again is NAMES("sdx_accel_torch") is not member
    with torch.no_grad():
        loaded(torch.ones(1, 4, 32))
    assert loaded._sdx.running.startswith("sdpa")


@pytest.mark.slow
def test_a_pickled_layer_works_in_a_fresh_process(tmp_path: Any) -> None:
    model = flux()
    sdx_patches.patch(model, owner="a", attention_op="torch")
    file = tmp_path / "attention.pickle"
    file.write_bytes(pickle.dumps(attentions(model)[1]))
    code = (
        "import pickle, sys, torch\n"
        "attention = pickle.load(open(sys.argv[1], 'rb'))\n"
        "print(attention(torch.ones(1, 4, 32)).abs().sum().item())\n"
        "print(attention._sdx.running, attention.processor._attention_backend.value)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    total, running, backend = done.stdout.split()
    with torch.no_grad():
        expected = attentions(model)[1](torch.ones(1, 4, 32)).abs().sum().item()
    assert float(total) == pytest.approx(expected, rel=1e-5)
    assert running.startswith("sdpa")
    assert backend == "sdx_accel_torch"


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("op", [None, "reference"])
def test_fullgraph_compiles_and_keeps_to_the_operator(op: str | None, whole: bool) -> None:
    model = flux()

    def run(compiled: bool) -> Tensor:
        target = model if whole else attentions(model)[1]
        call = torch.compile(target, backend="eager", fullgraph=True) if compiled else target
        if whole:
            return out(call)
        with torch.no_grad():
            return call(torch.linspace(-1, 1, 512).reshape(1, 16, 32))

    stock = run(compiled=False)
    sdx_patches.patch(model, owner="a", attention_op=op)
    expected = run(compiled=False)
    torch._dynamo.reset()
    launched = registry.launches.copy()
    traced = run(compiled=True)
    assert torch.equal(traced, expected)
    torch.testing.assert_close(traced, stock, atol=1e-5, rtol=0)
    if op is not None:
        # other bits than those of the automatic choice, which is torch's kernel here
        assert not torch.equal(traced, stock)
        assert set(registry.launches - launched) <= {op}
    torch._dynamo.reset()


@pytest.mark.parametrize("error", [ImportError, AttributeError, TypeError, ValueError])
def test_a_dispatcher_of_another_shape_does_not_break_the_import(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def changed(names: object, value: str) -> object:
        raise error("another enumeration")

    monkeypatch.setattr(dispatcher, "_new_member", changed)
    monkeypatch.setattr(dispatcher, "NAME", "sdx_never_registered")
    assert dispatcher.available() is False
