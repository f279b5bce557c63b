"""`layers()` before, during and after; and the host names that the patches rely on."""

import copy
import pickle
import subprocess
import sys
from typing import Any

import pytest
from diffusers.models import attention_dispatch
from torch import nn

import sdx_kernels
import sdx_patches
from sdx_patches import compat, dispatcher
from sdx_patches.families.tables import LEFT_MODULES, LEFT_PROCESSORS, REPLACED
from sdx_patches.report import Layer


def test_nothing_is_patched_before_and_after(tiny_sdxl: Any) -> None:
    pipe = tiny_sdxl()
    before = sdx_patches.layers(pipe)
    assert {layer.reason for layer in before} == {"not enabled"}
    assert {layer.running for layer in before} == {"AttnProcessor2_0", "sdpa"}
    assert not any(layer.patched for layer in before)
    with sdx_patches.patch(pipe, owner="test"):
        assert [layer.path for layer in sdx_patches.layers(pipe)] == [
            layer.path for layer in before
        ]
        assert all(layer.patched for layer in sdx_patches.layers(pipe))
    assert sdx_patches.layers(pipe) == before


def test_a_default_backend_that_a_processor_never_asks_for_is_said(
    tiny_unet: Any, unet_out: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    unet = tiny_unet()
    dispatcher.register()
    # put back at the end: it is the whole process's
    registry = attention_dispatch._AttentionBackendRegistry
    monkeypatch.setattr(registry, "_active_backend", registry._active_backend)
    unet.set_attention_backend("sdx_accel")
    before = sdx_kernels.launches.total()
    unet_out(unet)
    assert sdx_kernels.launches.total() == before
    assert all("but this processor asks for none" in x.reason for x in sdx_patches.layers(unet))
    with sdx_patches.patch(unet, owner="a"):
        assert not any("asks for none" in x.reason for x in sdx_patches.layers(unet))


def test_paths_lead_to_the_modules(tiny_sd: Any) -> None:
    pipe = tiny_sd()
    for layer in sdx_patches.layers(pipe):
        component, _, path = layer.path.partition(".")
        assert getattr(pipe, component).get_submodule(path)


def test_a_new_request_starts_a_new_record(tiny_unet: Any, unet_out: Any) -> None:
    unet = tiny_unet()
    sdx_patches.patch(unet, owner="a")
    unet_out(unet)
    ran = sdx_patches.layers(unet)
    assert "not run yet" not in {layer.running for layer in ran}
    sdx_patches.patch(unet, owner="a")
    assert sdx_patches.layers(unet) == ran, "an equal request changes nothing"
    sdx_patches.patch(unet, owner="a", attention_op="torch")
    assert {layer.running for layer in sdx_patches.layers(unet)} == {"not run yet"}


def test_reasons_say_why_the_others_did_not_run(tiny_unet: Any, unet_out: Any) -> None:
    unet = tiny_unet()
    sdx_patches.patch(unet, owner="a")
    unet_out(unet)
    assert all(": " in layer.reason for layer in sdx_patches.layers(unet))


def test_a_layer_is_a_plain_frozen_record() -> None:
    layer = Layer("unet.a", "auto", "torch", "")
    assert layer == Layer("unet.a", "auto", "torch", "")
    assert layer.patched
    assert not Layer("unet.a", "unchanged", "X", "").patched


def test_the_installed_hosts_have_every_name() -> None:
    assert compat.missing() == []


def test_a_lost_name_is_found_out(monkeypatch: Any) -> None:
    lost = ("diffusers.models.attention_processor:Gone", "no_such_host:x")
    monkeypatch.setattr(compat, "_HOST_NAMES", (*compat._HOST_NAMES, *lost))
    assert compat.missing() == list(lost)


def test_the_tables_name_classes_that_exist_and_never_twice() -> None:
    assert not REPLACED.keys() & LEFT_PROCESSORS.keys()
    for name in (*REPLACED, *LEFT_PROCESSORS, *LEFT_MODULES):
        module, _, cls = name.rpartition(".")
        assert compat._exists(f"{module}:{cls}"), name


def test_importing_the_patches_loads_no_host_library() -> None:
    code = (
        "import sys, sdx_patches\n"
        "print([m for m in ('diffusers', 'transformers', 'triton') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_xformers_operator_class_is_reported_by_its_name(tiny_unet: Any) -> None:
    unet = tiny_unet()
    sdx_patches.patch(unet, owner="a", attention_op=(type("FwOp", (), {"NAME": "fa2F"}), None))
    assert {layer.requested for layer in sdx_patches.layers(unet)} == {"fa2F"}
    sdx_patches.patch(unet, owner="a", attention_op=(None, None))
    assert {layer.requested for layer in sdx_patches.layers(unet)} == {"auto"}


def shown(root: nn.Module) -> list[str]:
    """What is printed of our layers; torch prints equal neighbours in a list of modules once."""
    return [line.strip() for line in repr(root).splitlines() if "sdx_accel=" in line]


def test_a_printed_model_shows_what_serves_each_layer(tiny_sd: Any, latents: Any) -> None:
    pipe = tiny_sd()
    stock = {name: repr(getattr(pipe, name)) for name in ("unet", "vae", "text_encoder")}
    with sdx_patches.patch(pipe, owner="a", attention_op="torch"):
        for name in stock:
            assert set(shown(getattr(pipe, name))) == {"sdx_accel='torch', running='not run yet'"}
        latents(pipe)
        for name in ("unet", "text_encoder"):
            layers = sdx_patches.layers(getattr(pipe, name))
            assert set(shown(getattr(pipe, name))) == {
                f"sdx_accel='torch', running={layer.running!r}" for layer in layers
            }
            assert "not run yet" not in {layer.running for layer in layers}
    assert {name: repr(getattr(pipe, name)) for name in stock} == stock


@pytest.mark.filterwarnings("ignore:enable_attention_slicing")
def test_a_printed_model_shows_what_took_over(tiny_unet: Any, unet_out: Any) -> None:
    unet = tiny_unet()
    sdx_patches.patch(unet, owner="a")
    unet.set_attention_slice(1)
    unet_out(unet)
    assert set(shown(unet)) == {"sdx_accel='unchanged', running='SlicedAttnProcessor'"}


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_printed_copy_speaks_for_itself(tiny_unet: Any, unet_out: Any, how: str) -> None:
    unet = tiny_unet()
    stock = repr(unet)
    sdx_patches.patch(unet, owner="a")
    twin = copy.deepcopy(unet) if how == "deepcopy" else pickle.loads(pickle.dumps(unet))
    unet_out(twin)
    assert set(shown(unet)) == {"sdx_accel='auto', running='not run yet'"}
    assert shown(twin)
    assert not set(shown(twin)) & set(shown(unet))
    sdx_patches.restore(twin, owner="b")
    assert repr(twin) == stock
    assert shown(unet)


def test_a_modules_own_description_stays(tiny_unet: Any) -> None:
    unet = tiny_unet()
    attention = first_attention(unet)
    own = {"extra_repr": lambda self: "mine"}
    attention.__class__ = type("Described", (type(attention),), own)
    with sdx_patches.patch(unet, owner="a"):
        assert attention.extra_repr() == "mine, sdx_accel='auto', running='not run yet'"
    assert attention.extra_repr() == "mine"
    assert "extra_repr" not in vars(attention)


def first_attention(unet: nn.Module) -> nn.Module:
    return next(m for m in unet.modules() if compat.is_a(m, compat.ATTENTION))


def test_the_report_tells_what_ran_under_the_interpreter_and_on_the_cpu(
    tiny_unet: Any, unet_out: Any
) -> None:
    """By itself nothing is ever interpreted; where it is asked for, the launches say so too."""
    unet = tiny_unet()
    sdx_patches.patch(unet, owner="a")
    before = sdx_kernels.launches.copy()
    unet_out(unet)
    assert sdx_kernels.launches - before == {"sdpa": 8}
    assert [layer.running for layer in sdx_patches.layers(unet)] == ["sdpa"] * 8
    sdx_patches.patch(first_attention(unet), owner="a", attention_op="triton")
    before = sdx_kernels.launches.copy()
    unet_out(unet)
    assert sdx_kernels.launches - before == {"triton": 1, "sdpa": 7}
    assert [layer.running for layer in sdx_patches.layers(unet)] == ["triton"] + ["sdpa"] * 7
