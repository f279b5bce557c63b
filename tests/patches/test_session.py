"""Owners, undo, copies: what `patch` and `restore` promise whatever the patch is."""

import copy
import pickle
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionImg2ImgPipeline, UNet2DConditionModel
from diffusers.models.attention_processor import Attention
from torch import nn

import sdx_accel  # noqa: F401  (attaches enable_xattn)
import sdx_patches
from sdx_accel.errors import PlacementError
from sdx_kernels.errors import InvalidInputs
from sdx_patches import families
from sdx_patches.attention import SdxAttnProcessor
from sdx_patches.plain import SdxFusedAttnProcessor


def processors(root: Any) -> dict[str, Any]:
    return {
        f"{name}.{path}": module.processor
        for name, part in modules(root)
        for path, module in part.named_modules()
        if hasattr(module, "processor")
    }


def modules(root: Any) -> list[tuple[str, nn.Module]]:
    if isinstance(root, nn.Module):
        return [("", root)]
    return [(name, part) for name, part in root.components.items() if isinstance(part, nn.Module)]


def state(root: Any, *, identities: bool) -> dict[str, Any]:
    """Everything about a pipeline that a patch could leave behind.

    With `identities`, objects are told apart by id; without, a twin built alike compares equal.
    """
    seen: dict[str, Any] = {}
    for name, part in modules(root):
        for path, module in part.named_modules():
            for key, value in vars(module).items():
                if key in ("_parameters", "_buffers", "_modules"):
                    value = sorted(value)
                elif key.endswith("_hooks"):
                    value = len(value)
                elif isinstance(value, dict):
                    value = {k: type(v).__name__ for k, v in value.items()}
                elif key == "config":
                    value = dict(vars(value) if hasattr(value, "to_dict") else value)
                    value = {k: v for k, v in value.items() if k != "_name_or_path"}
                elif not isinstance(value, bool | int | float | str | None):
                    value = id(value) if identities else type(value).__qualname__
                seen[f"{name}.{path}:{key}"] = value
            if identities:
                seen[f"{name}.{path}!config"] = id(vars(module).get("config"))
                seen[f"{name}.{path}!processor"] = id(getattr(module, "processor", None))
    return seen


def test_case_079_undo_gives_back_the_same_objects(tiny_sdxl: Any, latents: Any) -> None:
    pipe = tiny_sdxl()
    stock = latents(pipe)
    before = state(pipe, identities=True)
    sdx_patches.patch(pipe, owner="a")
    sdx_patches.patch(pipe, owner="a")
    assert state(pipe, identities=True) != before
    latents(pipe)
    sdx_patches.restore(pipe, owner="a")
    sdx_patches.restore(pipe, owner="a")
    assert state(pipe, identities=True) == before
    assert torch.equal(latents(pipe), stock)


def test_case_079_restore_of_a_pipeline_never_patched_is_a_no_op(tiny_sd: Any) -> None:
    pipe = tiny_sd()
    before = state(pipe, identities=True)
    sdx_patches.restore(pipe, owner="a")
    assert state(pipe, identities=True) == before


def test_case_070_a_shared_model_stays_patched_until_its_last_owner(
    tiny_sd: Any, latents: Any
) -> None:
    first = tiny_sd()
    second = StableDiffusionImg2ImgPipeline.from_pipe(first)
    before = state(first, identities=True)
    sdx_patches.patch(first, owner="first")
    sdx_patches.patch(second, owner="second", attention_op="torch")
    sdx_patches.restore(first, owner="first")
    assert all(layer.patched for layer in sdx_patches.layers(second))
    assert {layer.requested for layer in sdx_patches.layers(second)} == {"torch"}
    latents(first)
    sdx_patches.restore(second, owner="second")
    assert state(first, identities=True) == before


def test_two_calls_of_one_owner_count_once_and_the_last_arguments_hold(tiny_unet: Any) -> None:
    unet = tiny_unet()
    before = state(unet, identities=True)
    sdx_patches.patch(unet, owner="a", attention_op="torch")
    sdx_patches.patch(unet, owner="a")
    assert {layer.requested for layer in sdx_patches.layers(unet)} == {"auto"}
    sdx_patches.restore(unet, owner="a")
    assert state(unet, identities=True) == before


def test_the_last_call_of_any_owner_holds(tiny_unet: Any) -> None:
    unet = tiny_unet()
    sdx_patches.patch(unet, owner="a", attention_op="torch")
    sdx_patches.patch(unet, owner="b")
    sdx_patches.patch(unet, owner="a", attention_op="reference")
    assert {layer.requested for layer in sdx_patches.layers(unet)} == {"reference"}
    sdx_patches.restore(unet, owner="a")
    assert {layer.requested for layer in sdx_patches.layers(unet)} == {"auto"}


@pytest.mark.parametrize("patched_already", [False, True])
def test_a_failure_half_way_leaves_everything_as_it_was(
    tiny_sd: Any, latents: Any, monkeypatch: pytest.MonkeyPatch, patched_already: bool
) -> None:
    pipe = tiny_sd()
    untouched = state(pipe, identities=True)
    if patched_already:
        sdx_patches.patch(pipe, owner="first", attention_op="torch")
        pipe.unet.fuse_qkv_projections()
    before = state(pipe, identities=False)
    reports = sdx_patches.layers(pipe)
    calls: list[nn.Module] = []

    def broken(encoder: nn.Module, *args: Any) -> None:
        original(encoder, *args)
        calls.append(encoder)
        raise OSError("interrupted")

    original = families.walk.text_encoders.switch
    monkeypatch.setattr(families.walk.text_encoders, "switch", broken)
    with pytest.raises(OSError, match="interrupted"):
        sdx_patches.patch(pipe, owner="second")
    assert calls, "the failure has to come after something was patched"
    assert state(pipe, identities=False) == before
    assert sdx_patches.layers(pipe) == reports
    if patched_already:
        pipe.unet.unfuse_qkv_projections()
        sdx_patches.restore(pipe, owner="first")
    else:
        assert state(pipe, identities=True) == untouched


def test_a_session_restores_the_very_model_that_it_patched(tiny_sd: Any, tiny_unet: Any) -> None:
    pipe = tiny_sd()
    unet = pipe.unet
    before = state(unet, identities=True)
    with sdx_patches.patch(pipe, owner="a"):
        pipe.unet = tiny_unet()
        assert state(unet, identities=True) != before
    assert state(unet, identities=True) == before


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_case_088_a_copy_is_patched_and_independent(
    tiny_unet: Any, unet_out: Any, how: str
) -> None:
    unet = tiny_unet()
    sdx_patches.patch(unet, owner=f"model {id(unet)}")
    expected = unet_out(unet)
    twin = copy.deepcopy(unet) if how == "deepcopy" else pickle.loads(pickle.dumps(unet))
    assert torch.equal(unet_out(twin), expected)
    assert {layer.running for layer in sdx_patches.layers(twin)} != {"not run yet"}
    sdx_patches.restore(twin, owner=f"model {id(twin)}")
    assert not any(layer.patched for layer in sdx_patches.layers(twin))
    assert not twin._forward_pre_hooks
    assert all(layer.patched for layer in sdx_patches.layers(unet))
    assert unet._forward_pre_hooks
    unet.fuse_qkv_projections()
    unet_out(unet)
    assert {type(p) for p in processors(unet).values()} == {SdxFusedAttnProcessor}


# a process of its own; test_cases.py has one for a UNet
@pytest.mark.slow
def test_case_088_a_pickled_encoder_works_in_a_fresh_process(tiny_sd: Any, tmp_path: Any) -> None:
    pipe = tiny_sd()
    sdx_patches.patch(pipe, owner="a")
    file = tmp_path / "encoder.pickle"
    file.write_bytes(pickle.dumps(pipe.text_encoder))
    code = (
        "import pickle, sys, torch\n"
        "encoder = pickle.load(open(sys.argv[1], 'rb'))\n"
        "print(encoder(torch.arange(8)[None]).last_hidden_state.abs().sum().item())\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        expected = pipe.text_encoder(torch.arange(8)[None]).last_hidden_state.abs().sum().item()
    assert float(done.stdout) == pytest.approx(expected, rel=1e-5)


def test_everyone_restores_whoever_patched(tiny_unet: Any) -> None:
    unet = tiny_unet()
    before = state(unet, identities=True)
    sdx_patches.patch(unet, owner="a")
    sdx_patches.patch(unet, owner="b")
    sdx_patches.restore(unet, owner=sdx_patches.EVERYONE)
    assert state(unet, identities=True) == before


class NotAPipeline:
    """Has components, but no mapping of them."""

    components = ("unet", "vae")


@pytest.mark.parametrize("root", ["sdxl", None, 3, {"unet": nn.Linear(1, 1)}, NotAPipeline()])
def test_a_root_of_another_kind_is_refused(root: Any) -> None:
    with pytest.raises(TypeError, match="expected a diffusers pipeline or a torch"):
        sdx_patches.patch(root, owner="a")
    with pytest.raises(TypeError, match="expected a diffusers pipeline or a torch"):
        sdx_patches.restore(root, owner="a")


def test_an_owner_needs_a_name() -> None:
    with pytest.raises(ValueError, match="name of its own"):
        sdx_patches.patch(nn.Linear(1, 1), owner="")


def test_weights_on_meta_are_no_matter_for_attention_and_refused_for_a_budget(
    tiny_sd: Any,
) -> None:
    pipe = tiny_sd()
    with torch.device("meta"):
        pipe.unet = UNet2DConditionModel.from_config(pipe.unet.config)
    before = state(pipe, identities=True)
    with pytest.raises(PlacementError, match="unet has no weights"):
        pipe.enable_xattn(vram=8)
    assert state(pipe, identities=True) == before
    pipe.enable_xattn()
    assert all(layer.patched for layer in sdx_patches.layers(pipe))
    pipe.disable_xattn()
    assert state(pipe, identities=True) == before


@pytest.mark.parametrize("missing", ["unet", "text_encoder", "vae"])
def test_a_half_loaded_pipeline_is_patched_where_it_is_loaded(tiny_sd: Any, missing: str) -> None:
    pipe = tiny_sd()
    setattr(pipe, missing, None)
    before = state(pipe, identities=True)
    with sdx_patches.patch(pipe, owner="a"):
        layers = sdx_patches.layers(pipe)
        assert {layer.path.split(".")[0] for layer in layers} == {
            "unet", "text_encoder", "vae",
        } - {missing}  # fmt: skip
        assert all(layer.patched for layer in layers)
    assert state(pipe, identities=True) == before


class Refusing(Attention):
    """Does not let its processor be replaced."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "processor":
            raise OSError("this processor is fixed")
        super().__setattr__(name, value)


def refuse(unet: nn.Module) -> nn.Module:
    """Make the last of the model's attention modules one that refuses, and return it."""
    last = [m for m in unet.modules() if isinstance(m, Attention)][-1]
    last.__class__ = Refusing
    return last


def test_a_processor_that_cannot_be_set_leaves_everything_as_it_was(
    tiny_sd: Any, latents: Any
) -> None:
    pipe = tiny_sd()
    expected = latents(pipe)
    refuse(pipe.unet)
    before = state(pipe, identities=True)
    with pytest.raises(OSError, match="this processor is fixed") as raised:
        pipe.enable_xattn()
    assert any("unet could not be patched" in note for note in raised.value.__notes__)
    assert state(pipe, identities=True) == before
    assert torch.equal(latents(pipe), expected)


def test_a_part_that_cannot_be_undone_does_not_keep_the_others(tiny_unet: Any) -> None:
    unet = tiny_unet()
    before = state(unet, identities=True)
    sdx_patches.patch(unet, owner="a")
    last = refuse(unet)
    with pytest.raises(OSError, match="this processor is fixed"):
        sdx_patches.restore(unet, owner="a")
    last.__class__ = Attention
    still = [
        m for m in unet.modules() if isinstance(getattr(m, "processor", None), SdxAttnProcessor)
    ]
    assert still == [last]
    last.processor = last.processor.stock
    assert state(unet, identities=True) == before


def test_threads_that_patch_at_once_wait_for_each_other(
    tiny_sd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tiny_sd()
    before = state(pipe, identities=True)
    find = families.walk._replacement

    def slow(attention: nn.Module) -> Any:
        found = find(attention)
        time.sleep(0.001)  # the others get their chance between the look and the change
        return found

    monkeypatch.setattr(families.walk, "_replacement", slow)
    failed: list[BaseException] = []

    def work(owner: str) -> None:
        try:
            start.wait()
            for _ in range(2):
                sdx_patches.patch(pipe, owner=owner)
                sdx_patches.restore(pipe, owner=owner)
            sdx_patches.patch(pipe, owner=owner)
        except BaseException as error:
            failed.append(error)

    start = threading.Barrier(4)
    threads = [threading.Thread(target=work, args=(str(n),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert sdx_patches.owners(pipe) == {"0", "1", "2", "3"}
    assert all(layer.patched for layer in sdx_patches.layers(pipe))
    stock = [p.stock for p in processors(pipe).values()]
    assert not any(isinstance(p, SdxAttnProcessor) for p in stock)
    for n in range(4):
        sdx_patches.restore(pipe, owner=str(n))
    assert state(pipe, identities=True) == before


@pytest.mark.parametrize("first", ["enable_xattn", "disable_xattn"])
def test_switching_inside_a_running_forward(tiny_unet: Any, unet_out: Any, first: str) -> None:
    unet = tiny_unet()
    expected = unet_out(unet)
    before = state(unet, identities=True)
    second = {"enable_xattn": "disable_xattn", "disable_xattn": "enable_xattn"}[first]
    if first == "disable_xattn":
        unet.enable_xattn()
    # half of the layers run before the switch and half after, twice
    hooks = [
        unet.down_blocks[0].register_forward_hook(lambda *args: getattr(unet, first)() or args[2]),
        unet.mid_block.register_forward_hook(lambda *args: getattr(unet, second)() or args[2]),
    ]
    for _ in range(2):
        assert torch.allclose(unet_out(unet), expected, atol=1e-5)
    for hook in hooks:
        hook.remove()
    unet.disable_xattn()
    assert state(unet, identities=True) == before


def test_switching_in_a_callback_between_two_steps(tiny_sd: Any, latents: Any) -> None:
    pipe = tiny_sd()
    expected = latents(pipe)
    before = state(pipe, identities=True)

    def enable(pipe: Any, step: int, time: Any, values: Any) -> Any:
        pipe.enable_xattn()
        return values

    assert torch.allclose(latents(pipe, callback_on_step_end=enable), expected, atol=1e-5)
    ran = [x for x in sdx_patches.layers(pipe.unet) if x.patched and x.running != "not run yet"]
    assert len(ran) == len(sdx_patches.layers(pipe.unet))
    pipe.disable_xattn()
    assert state(pipe, identities=True) == before


def test_an_unknown_op_is_refused_before_anything_is_patched(tiny_unet: Any) -> None:
    unet = tiny_unet()
    before = state(unet, identities=True)
    with pytest.raises(InvalidInputs, match="no implementation named 'xformerz'"):
        sdx_patches.patch(unet, owner="a", attention_op="xformerz")
    assert state(unet, identities=True) == before


def test_unfusing_after_restore_does_not_bring_ours_back(tiny_unet: Any) -> None:
    unet = tiny_unet()
    sdx_patches.patch(unet, owner="a")
    unet.fuse_qkv_projections()
    sdx_patches.restore(unet, owner="a")
    unet.unfuse_qkv_projections()
    assert not any(isinstance(p, SdxAttnProcessor) for p in processors(unet).values())
