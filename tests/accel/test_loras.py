"""LoRA files: layers are found, strengths are right, misfits are refused (cases 076, 078)."""

import os
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from sdx_accel.errors import CheckpointError
from sdx_accel.runtime.loras import load_loras
from sdx_accel.runtime.random_models import build_random

_ATTENTION = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
_RANK = 4


@pytest.fixture
def pipe():
    return build_random("random:sdxl-tiny", torch.float32)


@pytest.fixture(scope="module")
def untouched():
    return build_random("random:sdxl-tiny", torch.float32)


def pair(module, generator, rank=_RANK):
    """(A, B) for a linear or convolution layer."""
    shape = module.weight.shape
    rest = shape[2:]
    down = torch.randn(rank, shape[1], *rest, generator=generator) * 0.1
    up = torch.randn(shape[0], rank, *(1 for _ in rest), generator=generator) * 0.1
    return down, up


def layers(pipe, component):
    """Every layer that trainers adapt: attention and MLP, in the UNet convolutions as well."""
    kinds = (torch.nn.Linear, torch.nn.Conv2d) if component == "unet" else (torch.nn.Linear,)
    return {
        name: module
        for name, module in getattr(pipe, component).named_modules()
        if isinstance(module, kinds) and name != "text_projection"
    }


def kohya_name(component, name):
    prefix = {"unet": "lora_unet_", "text_encoder": "lora_te1_", "text_encoder_2": "lora_te2_"}
    if component == "text_encoder" and not name.startswith("text_model."):
        name = f"text_model.{name}"
    return prefix[component] + name.replace(".", "_")


def write(path, pipe, style="kohya", alpha=lambda number: None, components=None):
    """A LoRA for all layers of a pipeline; `alpha` gives each layer's alpha or None."""
    generator = torch.Generator().manual_seed(1)
    tensors, number = {}, 0
    for component in components or ("unet", "text_encoder", "text_encoder_2"):
        for name, module in layers(pipe, component).items():
            down, up = pair(module, generator)
            if style == "kohya":
                base = kohya_name(component, name)
                tensors[f"{base}.lora_down.weight"], tensors[f"{base}.lora_up.weight"] = down, up
                if alpha(number) is not None:
                    tensors[f"{base}.alpha"] = torch.tensor(float(alpha(number)))
            else:
                a, b = {"peft": ("lora_A", "lora_B"), "older": ("lora.down", "lora.up")}[style]
                tensors[f"{component}.{name}.{a}.weight"] = down
                tensors[f"{component}.{name}.{b}.weight"] = up
            number += 1
    save_file(tensors, path)
    return len(tensors)


def deltas(pipe):
    """Merged minus original weight of each adapted layer."""
    found = {}
    for component in ("unet", "text_encoder", "text_encoder_2"):
        for name, module in getattr(pipe, component).named_modules():
            if hasattr(module, "get_delta_weight") and module.active_adapters:
                delta = sum(module.get_delta_weight(a) for a in module.active_adapters)
                found[component, name] = delta.detach()
    return found


def latents(pipe):
    pipe.set_progress_bar_config(disable=True)
    return pipe(
        "a lighthouse",
        height=64,
        width=64,
        num_inference_steps=1,
        output_type="latent",
        generator=torch.Generator().manual_seed(0),
    ).images


@pytest.mark.parametrize("style", ["kohya", "peft", "older"])
def test_every_layer_of_every_layout_is_found(pipe, untouched, tmp_path, style):
    file = tmp_path / "лора ü.safetensors"
    count = write(file, untouched, style)
    (report,) = load_loras(pipe, [(file, 0.5)])
    expected = {c: len(layers(untouched, c)) for c in ("unet", "text_encoder", "text_encoder_2")}
    assert report.layers == expected
    assert report.matched == report.total == count
    generator = torch.Generator().manual_seed(1)
    found = deltas(pipe)
    assert len(found) == sum(expected.values())
    for component in expected:
        for name, module in layers(untouched, component).items():
            down, up = pair(module, generator)
            if module.weight.ndim == 4:
                wanted = 0.5 * torch.einsum("orxy,rikl->oikl", up, down)
            else:
                wanted = 0.5 * up @ down
            torch.testing.assert_close(found[component, name], wanted, atol=1e-6, rtol=1e-4)
    assert not torch.equal(latents(pipe), latents(untouched))
    assert "at 0.5" in str(report)


def test_original_sdxl_names_reach_the_same_layers(pipe, untouched, tmp_path):
    """Trainers number the UNet's blocks as in the original file: input_blocks, output_blocks."""
    # one layer a level: down block n is input_blocks 1 + 2n, up block n outputs 2n and 2n + 1
    names = {
        "input_blocks_3_1_transformer_blocks_0_attn1_to_q": _ATTENTION,
        "input_blocks_3_0_in_layers_2": "down_blocks.1.resnets.0.conv1",
        "input_blocks_2_0_op": "down_blocks.0.downsamplers.0.conv",
        "input_blocks_5_1_proj_in": "down_blocks.2.attentions.0.proj_in",
        "middle_block_1_transformer_blocks_1_ff_net_2": (
            "mid_block.attentions.0.transformer_blocks.1.ff.net.2"
        ),
        "middle_block_2_emb_layers_1": "mid_block.resnets.1.time_emb_proj",
        "output_blocks_1_1_transformer_blocks_0_attn2_to_k": (
            "up_blocks.0.attentions.1.transformer_blocks.0.attn2.to_k"
        ),
        "output_blocks_1_2_conv": "up_blocks.0.upsamplers.0.conv",
        "output_blocks_4_0_skip_connection": "up_blocks.2.resnets.0.conv_shortcut",
    }
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for original, ours in names.items():
        down, up = pair(untouched.unet.get_submodule(ours), generator)
        tensors[f"lora_unet_{original}.lora_down.weight"] = down
        tensors[f"lora_unet_{original}.lora_up.weight"] = up
    save_file(tensors, tmp_path / "sgm.safetensors")
    (report,) = load_loras(pipe, [(tmp_path / "sgm.safetensors", 1.0)])
    assert report.matched == 2 * len(names)
    assert {name for _, name in deltas(pipe)} == set(names.values())


def test_case_078_missing_alpha_is_rank(untouched, tmp_path):
    found = {}
    for name, alpha in {"none": None, "4": 4, "2": 2}.items():
        write(tmp_path / f"{name}.safetensors", untouched, alpha=lambda n, a=alpha: a)
        pipe = build_random("random:sdxl-tiny", torch.float32)
        load_loras(pipe, [(tmp_path / f"{name}.safetensors", 1.0)])
        found[name] = deltas(pipe)
    assert found["none"].keys() == found["4"].keys() == found["2"].keys()
    for key, delta in found["none"].items():
        assert torch.allclose(delta, found["4"][key], atol=1e-6)
        assert torch.allclose(delta, 2 * found["2"][key], atol=1e-6)


def test_case_078_layers_with_and_without_alpha_in_one_file(pipe, untouched, tmp_path):
    """Each layer has its own alpha; one without is not given the others'."""
    cycle = (None, 2, 8)
    write(tmp_path / "mixed.safetensors", untouched, alpha=lambda number: cycle[number % 3])
    load_loras(pipe, [(tmp_path / "mixed.safetensors", 1.0)])
    write(tmp_path / "plain.safetensors", untouched)
    plain = build_random("random:sdxl-tiny", torch.float32)
    load_loras(plain, [(tmp_path / "plain.safetensors", 1.0)])
    reference = deltas(plain)
    components = ("unet", "text_encoder", "text_encoder_2")
    order = [(c, n) for c in components for n in layers(untouched, c)]
    assert set(order) == set(reference)
    actual = deltas(pipe)
    for number, key in enumerate(order):
        factor = (cycle[number % 3] or _RANK) / _RANK
        assert torch.allclose(actual[key], factor * reference[key], atol=1e-6), key


def test_several_files_add_up_and_keep_their_scales(pipe, untouched, tmp_path):
    write(tmp_path / "a.b.safetensors", untouched, components=["unet"])
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub" / "a.b.safetensors", untouched, "peft", components=["unet"])
    first, second = load_loras(
        pipe, [(tmp_path / "a.b.safetensors", 0.25), (tmp_path / "sub", -1.0)]
    )
    assert first.adapter != second.adapter
    layer = pipe.unet.get_submodule(_ATTENTION)
    one = layer.get_delta_weight(first.adapter) / 0.25
    torch.testing.assert_close(layer.get_delta_weight(second.adapter), -one)
    # a later call leaves the earlier scales alone
    (third,) = load_loras(pipe, [(tmp_path / "a.b.safetensors", 2.0)])
    assert set(layer.active_adapters) == {first.adapter, second.adapter, third.adapter}
    torch.testing.assert_close(layer.get_delta_weight(first.adapter), 0.25 * one)
    torch.testing.assert_close(layer.get_delta_weight(third.adapter), 2.0 * one)


def _is_unchanged(pipe, untouched):
    assert pipe.get_list_adapters() == {}
    for component in ("unet", "text_encoder", "text_encoder_2"):
        ours, theirs = getattr(pipe, component), getattr(untouched, component)
        assert [n for n, _ in ours.named_modules()] == [n for n, _ in theirs.named_modules()]
        assert all(
            torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)
        )
    return True


_FOREIGN = {
    "other model": ("transformer.blocks.{}.attn.lora_{}.weight", "AB"),
    "kohya": ("lora_unet_double_blocks_{}.lora_{}.weight", ("down", "up")),
    "unet": ("unet.no_such_block.{}.lora_{}.weight", "AB"),
}


@pytest.mark.parametrize("kind", _FOREIGN)
def test_case_076_keys_that_match_nothing(pipe, untouched, tmp_path, kind):
    file = tmp_path / "foreign.safetensors"
    pattern, roles = _FOREIGN[kind]
    names = [pattern.format(number, role) for number in range(6) for role in roles]
    save_file({name: torch.zeros(4, 4) for name in names}, file)
    good = tmp_path / "good.safetensors"
    write(good, untouched)
    with pytest.raises(CheckpointError, match="matched 0 of 12 keys") as caught:
        load_loras(pipe, [(good, 1.0), (file, 1.0)])
    assert str(file) in str(caught.value)
    assert caught.value.exit_code == 2
    assert _is_unchanged(pipe, untouched)
    assert torch.equal(latents(pipe), latents(untouched))


def test_file_that_is_no_lora(pipe, untouched, tmp_path):
    save_file({f"x{i}": torch.zeros(1) for i in range(12)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="no LoRA: matched 0 of 12 keys"):
        load_loras(pipe, [(tmp_path / "x.safetensors", 1.0)])
    assert _is_unchanged(pipe, untouched)


def test_lora_with_another_models_sizes(pipe, untouched, tmp_path):
    other = build_random("random:sd15-tiny", torch.float32)
    file = tmp_path / "sd15.safetensors"
    write(file, other, components=["unet", "text_encoder"])
    with pytest.raises(
        CheckpointError, match=r"another model: matched \d+ of \d+ keys; .* in the file"
    ):
        load_loras(pipe, [(file, 1.0)])
    assert _is_unchanged(pipe, untouched)


def test_keys_without_a_layer_are_counted(pipe, untouched, tmp_path):
    down, up = pair(untouched.unet.get_submodule(_ATTENTION), torch.Generator().manual_seed(0))
    tensors = {
        f"unet.{_ATTENTION}.lora_A.weight": down,
        f"unet.{_ATTENTION}.lora_B.weight": up,
        "unet.elsewhere.lora_A.weight": down.clone(),
        "unet.elsewhere.lora_B.weight": up.clone(),
    }
    save_file(tensors, tmp_path / "partly.safetensors")
    (report,) = load_loras(pipe, [(tmp_path / "partly.safetensors", 1.0)])
    assert (report.matched, report.total) == (2, 4)
    assert "2 keys match nothing" in str(report)


def test_failure_half_way_takes_everything_back(pipe, untouched, tmp_path, monkeypatch):
    for name in ("one", "two"):
        write(tmp_path / f"{name}.safetensors", untouched)
    real = type(pipe).load_lora_weights
    calls = []

    def fail_second(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("first line\nsecond line")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(type(pipe), "load_lora_weights", fail_second)
    files = [(tmp_path / f"{name}.safetensors", 1.0) for name in ("one", "two")]
    with pytest.raises(CheckpointError, match=r"two\.safetensors could not be loaded: first line$"):
        load_loras(pipe, files)
    assert _is_unchanged(pipe, untouched)


def test_dora_is_refused_rather_than_half_applied(pipe, tmp_path):
    names = [
        f"lora_unet_{_ATTENTION.replace('.', '_')}.{n}" for n in ("lora_up.weight", "dora_scale")
    ]
    save_file({name: torch.zeros(4, 4) for name in names}, tmp_path / "dora.safetensors")
    with pytest.raises(CheckpointError, match="DoRA"):
        load_loras(pipe, [(tmp_path / "dora.safetensors", 1.0)])


def test_no_such_lora_names_what_is_there(pipe, untouched, tmp_path):
    write(tmp_path / "style.safetensors", untouched, components=["unet"])
    for missing in (tmp_path / "stile.safetensors", str(tmp_path / "stile.safetensors")):
        with pytest.raises(CheckpointError, match=r"--lora .*: no such file; .*style\.safetensors"):
            load_loras(pipe, [(missing, 1.0)])
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"0 \.safetensors files"):
        load_loras(pipe, [(tmp_path / "empty", 1.0)])
    assert load_loras(pipe, []) == []


def test_without_peft_the_message_says_so(pipe, untouched, tmp_path, monkeypatch):
    write(tmp_path / "x.safetensors", untouched, components=["unet"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=re.escape("pip install peft")):
        load_loras(pipe, [(tmp_path / "x.safetensors", 1.0)])


# a process of its own, up to 14 s on a slow machine; test_cli_process.py has one for every prompt
@pytest.mark.slow
def test_case_136_lora_path_in_the_c_locale(untouched, tmp_path):
    file = tmp_path / "стиль 日本 🙂.safetensors"
    write(file, untouched, components=["unet"])
    code = (
        "import sys, torch\n"
        "from sdx_accel.runtime.loras import load_loras\n"
        "from sdx_accel.runtime.random_models import build_random\n"
        "pipe = build_random('random:sdxl-tiny', torch.float32)\n"
        "print(load_loras(pipe, [(sys.argv[1], 1.0)])[0].matched)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(file)],
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        check=False,
    )
    assert int(done.stdout or 0) == 2 * len(layers(untouched, "unet")), done.stderr.decode()
