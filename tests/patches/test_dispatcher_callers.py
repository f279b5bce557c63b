"""Whose call our backend serves: after an interrupt, in threads, where models share processors."""

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from diffusers.models import attention_dispatch as host
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from torch import nn

import sdx_patches
from sdx_kernels import registry
from sdx_patches import dispatcher, dispatcher_sites

from .dispatcher_case import attentions, backends, flux, out

BACKENDS = host._AttentionBackendRegistry
ONE = torch.ones(1, 4)


@pytest.fixture(autouse=True)
def _active_backend() -> Iterator[None]:
    """diffusers keeps one active backend for the whole process; leave it as it was."""
    before = BACKENDS._active_backend
    yield
    BACKENDS.set_active_backend(before)


def running(model: nn.Module) -> set[str]:
    return {layer.running for layer in sdx_patches.layers(model)}


def reasons(model: nn.Module) -> set[str]:
    return {layer.reason for layer in sdx_patches.layers(model)}


def interrupt(model: nn.Module, error: type[BaseException]) -> None:
    """Run the model and stop it inside its first attention."""

    def stop(*args: Any) -> None:
        raise error("stopped")

    hook = attentions(model)[0].to_k.register_forward_hook(stop)
    with pytest.raises(error, match="stopped"):
        out(model)
    hook.remove()


STOPS = pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])


@STOPS
def test_a_stopped_call_keeps_nothing_alive(error: type[BaseException]) -> None:
    model = flux()
    sdx_patches.patch(model, owner="a")
    interrupt(model, error)
    sdx_patches.restore(model, owner="a")
    weight = weakref.ref(attentions(model)[0].to_q.weight)
    del model
    gc.collect()
    assert weight() is None


@STOPS
def test_a_call_after_a_stopped_one_is_not_the_stopped_ones(error: type[BaseException]) -> None:
    model, other = flux(), flux()
    sdx_patches.patch(model, owner="a", attention_op="reference")
    interrupt(model, error)
    for attention in attentions(other):
        attention.set_attention_backend("sdx_accel")
    launched = registry.launches.total()
    out(other)
    host.dispatch_attention_fn(*torch.randn(3, 2, 5, 4, 8), backend="sdx_accel")
    assert registry.launches.total() == launched + 4
    assert running(model) == {"not run yet"}
    out(model)
    assert running(model) == {"reference"}
    assert running(other) == {"sdx_accel"}


@pytest.mark.parametrize("again", [False, True])
def test_disabling_in_the_middle_of_a_layer_leaves_nothing(again: bool) -> None:
    model, other = flux(), flux()
    expected = out(model)
    sdx_patches.patch(model, owner="a")
    first = attentions(model)[0]

    def disable(layer: nn.Module, *args: Any) -> None:
        # not through the closure, which would keep the model alive
        root = found()
        sdx_patches.restore(root, owner="a")
        if again:
            sdx_patches.patch(root, owner="a", attention_op="reference")

    found = weakref.ref(model)
    hook = first.to_k.register_forward_hook(disable)
    torch.testing.assert_close(out(model), expected, atol=1e-5, rtol=0)
    hook.remove()
    before = running(model)
    assert before == ({"reference"} if again else {"native"})
    for attention in attentions(other):
        attention.set_attention_backend("sdx_accel")
    out(other)
    assert running(model) == before
    weight = weakref.ref(first.to_q.weight)
    sdx_patches.restore(model, owner="a")
    assert backends(model) == [None] * 3
    del model, first
    gc.collect()
    assert weight() is None


def test_another_thread_serves_its_own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = flux(), flux()
    sdx_patches.patch(model, owner="a")
    sdx_patches.patch(other, owner="a", attention_op="reference")
    attend, seen = dispatcher.attend, []

    def while_another_runs(*args: Any, **kwargs: Any) -> Any:
        if not seen:
            seen.append(True)
            thread = threading.Thread(target=out, args=(other,))
            thread.start()
            thread.join()
            assert running(other) == {"reference"}
            assert running(model) == {"not run yet"}
        return attend(*args, **kwargs)

    monkeypatch.setattr(dispatcher, "attend", while_another_runs)
    out(model)
    assert seen
    assert "reference" not in running(model)


def sharing(op: str | None = "reference") -> tuple[Any, Any, FluxAttnProcessor]:
    """An enabled model, one that is not, and the processor of both."""
    shared, model, other = FluxAttnProcessor(), flux(), flux()
    for each in (model, other):
        each.set_attn_processor(shared)
    sdx_patches.patch(model, owner="a", attention_op=op)
    return model, other, shared


def test_a_model_that_shares_a_processor_runs_what_it_ran() -> None:
    model, other, shared = sharing()
    expected = out(flux())
    launched = registry.launches.copy()
    assert torch.equal(out(other), expected)
    assert registry.launches == launched
    assert running(other) == {"native"}
    assert not any(layer.patched for layer in sdx_patches.layers(other))
    assert all("its processor is also that of a model that is" in r for r in reasons(other))
    out(model)
    assert registry.launches - launched == {"reference": 3}
    assert running(model) == {"reference"}
    sdx_patches.restore(model, owner="a")
    assert vars(shared) == {}
    assert reasons(other) == {"not enabled"}


@pytest.mark.parametrize("by_name", [False, True])
def test_a_shared_processor_keeps_the_backend_that_was_chosen(by_name: bool) -> None:
    shared, model, other = FluxAttnProcessor(), flux(), flux()
    for each in (model, other):
        each.set_attn_processor(shared)
    sdx_patches.patch(model, owner="a", attention_op="reference")
    if by_name:
        # diffusers makes it the default of the process too
        other.set_attention_backend("sdx_accel")
        assert running(other) == {"sdx_accel"}
        assert all("process's default" in reason for reason in reasons(other))
        launched = registry.launches.total()
        out(other)
        assert registry.launches.total() == launched + 3
    else:
        other.set_attention_backend("_native_math")
        assert running(model) == running(other) == {"_native_math"}
    sdx_patches.restore(model, owner="a")


@pytest.mark.parametrize("first", ["model", "other"])
def test_two_enabled_models_keep_to_their_own_operators(first: str) -> None:
    model, other, shared = sharing()
    sdx_patches.patch(other, owner="b", attention_op="torch")
    for _ in range(2):
        out(model)
        out(other)
    assert running(model) == {"reference"}
    assert all(name.startswith("sdpa") for name in running(other))
    gone, stays = (model, other) if first == "model" else (other, model)
    sdx_patches.restore(gone, owner="a" if first == "model" else "b")
    assert all(layer.patched for layer in sdx_patches.layers(stays))
    assert reasons(gone) != {"not enabled"}
    launched = registry.launches.total()
    out(gone)
    assert registry.launches.total() == launched
    out(stays)
    assert registry.launches.total() == launched + 3
    sdx_patches.restore(stays, owner="b" if first == "model" else "a")
    assert vars(shared) == {}


def test_a_model_that_runs_within_a_call_of_another_keeps_its_own_operator() -> None:
    model, other, _ = sharing()
    sdx_patches.patch(other, owner="b", attention_op="torch")

    def call_other(*args: Any) -> None:
        out(other)

    launched = registry.launches.copy()
    hook = attentions(model)[0].to_k.register_forward_hook(call_other)
    out(model)
    hook.remove()
    assert registry.launches - launched == {"reference": 3, "sdpa": 3}
    assert running(model) == {"reference"}


def test_a_dropped_model_does_not_hold_a_shared_processor() -> None:
    model, other, shared = sharing()
    sdx_patches.patch(other, owner="b")
    del model
    gc.collect()
    sdx_patches.restore(other, owner="b")
    assert vars(shared) == {}


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_of_one_model_is_restored_alone(how: str) -> None:
    model, other, shared = sharing()
    sdx_patches.patch(other, owner="b")
    twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert torch.equal(out(twin), out(model))
    assert running(twin) == {"reference"}
    sdx_patches.restore(twin, owner="a")
    assert all(vars(attention.processor) == {} for attention in attentions(twin))
    assert shared._attention_backend is not None


def test_a_copy_of_the_model_that_is_not_enabled_is_cleared_by_disabling_it() -> None:
    model, other, shared = sharing()
    twin = copy.deepcopy(other)
    assert torch.equal(out(twin), out(other))
    sdx_patches.restore(twin, owner="a")
    assert all(vars(attention.processor) == {} for attention in attentions(twin))
    sdx_patches.restore(other, owner="a")
    assert shared._attention_backend is not None
    out(model)
    assert running(model) == {"reference"}


def test_a_failed_second_model_leaves_the_first_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other, shared = sharing()
    before = dict(vars(shared))
    install, done = dispatcher_sites.install, []

    def failing(attention: nn.Module, session: Any) -> None:
        if done:
            raise OSError("stopped")
        install(attention, session)
        done.append(attention)

    monkeypatch.setattr(dispatcher_sites, "install", failing)
    with pytest.raises(OSError, match="stopped"):
        sdx_patches.patch(other, owner="b")
    assert vars(shared) == before
    out(model)
    assert running(model) == {"reference"}
    sdx_patches.restore(model, owner="a")
    assert vars(shared) == {}


def test_a_failed_second_enable_leaves_a_processor_installed_since_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, fresh = flux(), FluxAttnProcessor()
    sdx_patches.patch(model, owner="a")
    model.set_attn_processor(fresh)
    install = dispatcher_sites.install

    def failing(attention: nn.Module, session: Any) -> None:
        install(attention, session)
        raise OSError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(dispatcher_sites, "install", failing)
        with pytest.raises(OSError, match="stopped"):
            sdx_patches.patch(model, owner="b")
    assert vars(fresh) == {}
    out(model)
    assert all(layer.patched for layer in sdx_patches.layers(model))
    sdx_patches.restore(model, owner="a")
    assert vars(fresh) == {}


def test_a_processor_that_left_the_model_is_given_back() -> None:
    model = flux()
    sdx_patches.patch(model, owner="a")
    old = [weakref.ref(attention.processor) for attention in attentions(model)]
    kept = attentions(model)[0].processor
    model.set_attn_processor(FluxAttnProcessor())
    out(model)
    assert vars(kept) == {}
    gc.collect()
    assert [reference() is None for reference in old] == [False, True, True]
    sdx_patches.restore(model, owner="a")


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("how", ["script", "trace"])
def test_scripted_parts_are_stepped_over(how: str) -> None:
    plain = nn.Sequential(nn.Linear(4, 4))
    script = torch.jit.script if how == "script" else partial(torch.jit.trace, example_inputs=ONE)
    scripted = script(plain)
    assert not dispatcher.serves(scripted)
    model = flux()
    model.extra = scripted
    sdx_patches.patch(model, owner="a")
    out(model)
    assert len(sdx_patches.layers(model)) == 3
    assert sdx_patches.layers(scripted) == []
    sdx_patches.restore(model, owner="a")
    assert backends(model) == [None] * 3
