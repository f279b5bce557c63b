"""Public architectures, their descriptions, and random pipelines built from them."""

import hashlib
import json

import pytest
import torch

from sdx_accel.errors import CheckpointError
from sdx_accel.runtime import random_models
from sdx_accel.runtime.architectures import RANDOM_SPECS, architecture, is_random_spec
from sdx_accel.runtime.checkpoints import describe, describe_pipeline, load, meta_component
from sdx_accel.runtime.descriptions import ComponentDescription, ModelDescription, jsonable
from sdx_accel.runtime.random_models import build_random, build_random_component

_PUBLISHED = {
    "random:sdxl": {
        "unet": 2_567_463_684,
        "text_encoder": 123_060_480,
        "text_encoder_2": 694_659_840,
        "vae": 83_653_863,
    },
    "random:sd15": {"unet": 859_520_964, "text_encoder": 123_060_480, "vae": 83_653_863},
}
_TINY = [spec for spec in RANDOM_SPECS if spec.endswith("-tiny")]


@pytest.fixture(scope="module", params=_TINY)
def tiny(request):
    return build_random(request.param, torch.float32)


def picture(pipe, prompt="a lighthouse", size=64, steps=2, seed=0):
    pipe.set_progress_bar_config(disable=True)
    return torch.from_numpy(
        pipe(
            prompt,
            height=size,
            width=size,
            num_inference_steps=steps,
            generator=torch.Generator().manual_seed(seed),
            output_type="np",
        ).images[0]
    )


@pytest.mark.parametrize("spec", _PUBLISHED)
def test_parameter_counts_are_the_published_ones(spec):
    counts = {}
    for name, component in describe(spec).components.items():
        module = meta_component(component)
        assert all(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])
        counts[name] = sum(parameter.numel() for parameter in module.parameters())
    assert counts == _PUBLISHED[spec]


def test_sdxl_facts_that_memory_and_numerics_depend_on():
    sdxl = describe("random:sdxl")
    vae = sdxl.components["vae"].config
    assert (vae["force_upcast"], vae["sample_size"], vae["scaling_factor"]) == (True, 1024, 0.13025)
    assert (sdxl.default_height, sdxl.default_width) == (1024, 1024)
    assert sdxl.scheduler[0] == "EulerDiscreteScheduler"
    other = describe("random:sdxl-fp16vae")
    assert other.components["vae"].config == {**vae, "force_upcast": False}
    assert other.components["unet"] == sdxl.components["unet"]


@pytest.mark.parametrize("spec", RANDOM_SPECS)
def test_description_survives_json(spec):
    description = describe(spec)
    assert is_random_spec(spec)
    assert ModelDescription.from_dict(json.loads(description.to_json())) == description


def test_descriptions_are_fresh_data():
    describe("random:sdxl").components["unet"].config["block_out_channels"].append(1)
    assert describe("random:sdxl").components["unet"].config["block_out_channels"][-1] == 1280


@pytest.mark.parametrize("spec", ["random:sdxl-tinny", "random:", "random:sd16"])
@pytest.mark.parametrize("call", [describe, load, lambda spec: build_random(spec, torch.float32)])
def test_unknown_spec_lists_the_known_ones(spec, call):
    with pytest.raises(CheckpointError, match="did you mean 'random:sd") as caught:
        call(spec)
    assert all(known in str(caught.value) for known in RANDOM_SPECS)


def test_configuration_that_a_class_refuses():
    component = architecture("random:sdxl-tiny").components["unet"]
    broken = ComponentDescription(
        "unet", "diffusers", component.class_name, {**component.config, "attention_head_dim": [1]}
    )
    with pytest.raises(CheckpointError, match="configuration of unet does not fit"):
        meta_component(broken)


@pytest.mark.parametrize(
    ("library", "name", "expected"),
    [("os", "system", "only classes of"), ("diffusers", "NoSuchModel", "does not have")],
)
def test_only_known_classes_are_imported(library, name, expected):
    with pytest.raises(CheckpointError, match=expected):
        meta_component(ComponentDescription("unet", library, name, {}))


def test_live_pipeline_describes_itself(tiny):
    live = describe_pipeline(tiny)
    specs = {describe(spec).pipeline_class: spec for spec in _TINY}
    table = describe(specs[live.pipeline_class])
    assert live.pipeline_class == table.pipeline_class
    assert live.default_dtype == "float32"
    # Flux's pipeline has a size of its own, its transformer has none
    side = 1024 if live.pipeline_class == "FluxPipeline" else 128
    assert (live.default_height, live.default_width) == (side, side)
    assert live.scheduler[0] == table.scheduler[0]
    assert live.components.keys() == table.components.keys()
    for name, component in table.components.items():
        for key, value in component.config.items():
            assert jsonable(live.components[name].config[key]) == value, (name, key)
        rebuilt = meta_component(live.components[name])
        original = getattr(tiny, name)
        assert {k: v.shape for k, v in rebuilt.state_dict().items()} == {
            k: v.shape for k, v in original.state_dict().items()
        }
    assert ModelDescription.from_dict(json.loads(live.to_json())) == live


def test_description_sees_through_compiled_modules():
    pipe = build_random("random:sd15-tiny", torch.float16)
    plain = describe_pipeline(pipe)
    pipe.unet = torch.compile(pipe.unet)
    assert describe_pipeline(pipe) == plain
    assert plain.default_dtype == "float16"


def test_random_pipelines_have_real_weights_and_buffers(tiny):
    for name, module in tiny.components.items():
        if not isinstance(module, torch.nn.Module):
            continue
        assert not module.training
        for key, tensor in [*module.named_parameters(), *module.named_buffers()]:
            assert not tensor.is_meta, (name, key)
            assert tensor.isfinite().all()
            if key.endswith("position_ids"):
                assert torch.equal(tensor[0], torch.arange(77))


def test_pictures_follow_prompt_and_seed(tiny):
    first = picture(tiny)
    assert first.isfinite().all()
    assert first.std() > 0.05
    assert torch.equal(first, picture(tiny))
    assert (first - picture(tiny, "another prompt")).abs().mean() > 1e-3
    assert (first - picture(tiny, seed=1)).abs().mean() > 1e-2


@pytest.mark.parametrize("size", [128, 256])
def test_larger_pictures_are_finite(tiny, size):
    result = picture(tiny, size=size, steps=1)
    assert result.shape == (size, size, 3)
    assert result.isfinite().all()
    assert result.std() > 0.05


def test_activations_fit_fp16_over_fifty_steps(tiny):
    """Each layer's largest output is watched: eight times below fp16's limit."""
    largest = 0.0

    def watch(module, inputs, output):
        nonlocal largest
        if isinstance(output, torch.Tensor):
            largest = max(largest, float(output.detach().abs().max()))

    denoiser = tiny.unet if hasattr(tiny, "unet") else tiny.transformer
    hooks = [
        module.register_forward_hook(watch)
        for part in (denoiser, tiny.vae, tiny.text_encoder)
        for module in part.modules()
    ]
    try:
        assert picture(tiny, steps=50).isfinite().all()
    finally:
        for hook in hooks:
            hook.remove()
    assert 0 < largest < 65504 / 8


def _digest(module):
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()[:16]


def test_same_bytes_on_every_machine():
    """Golden digests: a change means that every published figure with random weights changes."""
    parts = architecture("random:sdxl-tiny").components
    digests = {name: _digest(build_random_component(parts[name], torch.float16)) for name in parts}
    assert digests == {
        "text_encoder": "13ec3123f2237957",
        "text_encoder_2": "3b1bd518fb30afea",
        "unet": "3ff71504e43e3746",
        "vae": "af50fbcb221a4ed6",
    }


def test_bytes_do_not_depend_on_threads_or_instruction_set(monkeypatch):
    part = architecture("random:sdxl-tiny").components["vae"]
    reference = _digest(build_random_component(part, torch.float32))
    monkeypatch.setattr(random_models.os, "cpu_count", lambda: 1)
    torch.manual_seed(99)
    assert _digest(build_random_component(part, torch.float32)) == reference
    assert _digest(build_random_component(part, torch.float32, seed=1)) != reference


def test_dtypes_are_one_rounding_apart():
    part = architecture("random:sdxl-tiny").components["unet"]
    full = build_random_component(part, torch.float32).state_dict()
    for dtype in (torch.float16, torch.bfloat16):
        state = build_random_component(part, dtype).state_dict()
        assert all(torch.equal(state[key], full[key].to(dtype)) for key in full)


def test_weights_have_the_deviation_they_were_asked_for():
    values = random_models.draw_weights((256, 1024), "weight", "any key")
    assert values.std() == pytest.approx(1 / 32, rel=0.01)
    assert abs(values.mean()) < 1e-3
    norm = random_models.draw_weights((4096,), "norm", "any key")
    assert norm.mean() == pytest.approx(1.0, abs=0.01)
    assert not torch.equal(values, random_models.draw_weights((256, 1024), "weight", "another key"))
