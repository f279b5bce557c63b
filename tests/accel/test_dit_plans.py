"""What is planned for transformers: the pipeline's own calls, from configurations alone."""

import inspect
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import sdx_accel
from sdx_accel.budget.allocator import reserved_peak
from sdx_accel.budget.machine import Machine
from sdx_accel.budget.search import make_plan
from sdx_accel.budget.units import GIB
from sdx_accel.errors import RefusedError, SizeError
from sdx_accel.runtime import trace
from sdx_accel.runtime.architectures import architecture
from sdx_accel.runtime.checkpoints import describe, meta_component
from sdx_accel.runtime.descriptions import ModelDescription
from sdx_accel.runtime.meta_models import describe_pipeline
from sdx_accel.runtime.phase_calls import phase_call
from sdx_accel.runtime.planning import job_of_call
from sdx_accel.runtime.profiler import Job, profile_job
from sdx_accel.runtime.random_models import build_random_component

from .dit_case import build, latents

PUBLISHED = {
    "random:sd3": {
        "text_encoder": 123_650_304,
        "text_encoder_2": 694_659_840,
        "text_encoder_3": 4_762_310_656,
        "transformer": 2_028_328_000,
        "vae": 83_819_683,
    },
    "random:flux": {
        "text_encoder": 123_060_480,
        "text_encoder_2": 4_762_310_656,
        "transformer": 11_901_408_320,
        "vae": 83_819_683,
    },
    "random:pixart-sigma": {
        "text_encoder": 4_762_310_656,
        "transformer": 610_856_096,
        "vae": 83_653_863,
    },
}


@pytest.mark.parametrize("spec", PUBLISHED)
def test_parameter_counts_are_the_published_ones(spec: str) -> None:
    found = describe(spec)
    assert (found.default_height, found.default_width) == (1024, 1024)
    counts = {
        name: sum(p.numel() for p in meta_component(component).parameters())
        for name, component in found.components.items()
    }
    assert counts == PUBLISHED[spec]


# -- the calls


def _told(args: tuple[Any, ...], kwargs: dict[str, Any], forward: Any) -> dict[str, Any]:
    """A call's arguments by name, tensors as their shapes and dtypes, without what is None."""
    values = inspect.signature(forward).bind(*args, **kwargs).arguments
    values |= values.pop("kwargs", {})
    plain = tree_map_only(Tensor, lambda t: (tuple(t.shape), t.dtype), dict(values))
    # pipelines hand on an empty table of settings for attention
    ignored = ("joint_attention_kwargs", "output_hidden_states")
    return {k: v for k, v in plain.items() if v is not None and k not in ignored}


class _Listen:
    """Notes the calls of some models."""

    def __init__(self, models: dict[str, Any]) -> None:
        self.calls: dict[str, list[dict[str, Any]]] = {name: [] for name in models}
        self._handles = [
            model.register_forward_pre_hook(self._note(name), with_kwargs=True)
            for name, model in models.items()
        ]

    def _note(self, name: str) -> Any:
        def note(model: Any, args: Any, kwargs: Any) -> None:
            self.calls[name].append(_told(args, kwargs, model.forward))

        return note

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


CASES = {
    "sd3": ("sd3", {}),
    "sd3 without guidance": ("sd3", {"guidance_scale": 1.0, "max_sequence_length": 40}),
    "sd3, two pictures": ("sd3", {"num_images_per_prompt": 2, "width": 96}),
    "flux": ("flux", {}),
    "flux, odd sizes": ("flux", {"height": 56, "width": 90, "max_sequence_length": 48}),
    "flux guided": ("flux", {"negative_prompt": "blur", "true_cfg_scale": 2.0}),
    "pixart sigma": ("pixart sigma", {"num_images_per_prompt": 2}),
    "pixart alpha": ("pixart alpha", {"guidance_scale": 1.0}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_planned_calls_are_those_of_the_pipeline(case: str) -> None:
    name, arguments = CASES[case]
    pipe = build(name)
    texts = [n for n in pipe.components if n.startswith("text_encoder")]
    listen = _Listen({n: getattr(pipe, n) for n in (*texts, "transformer")})
    latents(pipe, num_inference_steps=2, **arguments)
    listen.close()
    description = describe_pipeline(pipe)
    given = {"height": 64, "width": 64, **arguments}
    if "pixart" in name:
        given["use_resolution_binning"] = False
    config = pipe.transformer.config
    job = job_of_call(type(pipe), config, 8, ("x",), given, description.components)
    profile = profile_job(description, job, dict.fromkeys(description.components, "float32"))
    assert profile.job["batch"] == arguments.get("num_images_per_prompt", 1)
    planned: dict[str, list[dict[str, Any]]] = {}
    for phase, names in (("text", texts), ("denoise", ["transformer"])):
        # as `profile_job` has completed it
        done = Job(**{key: value for key, value in profile.job.items()})
        made, modules, _, _ = phase_call(
            phase, description, done, dict.fromkeys(description.components, "float32")
        )
        heard = _Listen(dict(zip(names, modules, strict=True)))
        with torch.no_grad():
            made()
        heard.close()
        planned |= heard.calls
    # two steps were run, and one is planned
    steps = listen.calls.pop("transformer")
    assert steps[: len(steps) // 2] == planned.pop("transformer")
    for text, calls in planned.items():
        assert len(calls) == len(listen.calls[text])
        for call, real in zip(calls, listen.calls[text], strict=True):
            # one prompt is read, and repeated behind the encoder
            assert call.keys() == real.keys()
            assert call["input_ids"][0][1:] == real["input_ids"][0][1:]


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        ("FluxPipeline", {}, {"height": 1024, "width": 1024, "tokens": 512, "guided": False}),
        ("FluxPipeline", {"guidance_scale": 9.0}, {"guided": False}),
        ("FluxPipeline", {"true_cfg_scale": 4.0}, {"guided": False}),
        ("FluxPipeline", {"true_cfg_scale": 4.0, "negative_prompt": ""}, {"guided": True}),
        ("FluxPipeline", {"height": 1000, "width": 777}, {"height": 992, "width": 768}),
        ("FluxPipeline", {"prompt_embeds": torch.empty(3, 60, 8)}, {"tokens": 60}),
        ("StableDiffusion3Pipeline", {}, {"height": 1024, "tokens": 256, "guided": True}),
        ("StableDiffusion3Pipeline", {"guidance_scale": 1.0}, {"guided": False}),
        ("StableDiffusion3Pipeline", {"max_sequence_length": 77}, {"tokens": 77}),
        ("StableDiffusion3Pipeline", {"prompt_embeds": torch.empty(1, 333, 8)}, {"tokens": 256}),
        ("StableDiffusion3Img2ImgPipeline", {"image": torch.empty(1, 3, 8, 8)}, {"encode": True}),
        ("PixArtSigmaPipeline", {}, {"height": 1024, "tokens": 300}),
        ("PixArtAlphaPipeline", {}, {"height": 1024, "tokens": 120}),
        # its table's closest shape to 2 : 1
        ("PixArtSigmaPipeline", {"height": 1000, "width": 500}, {"height": 1408, "width": 704}),
    ],
)
def test_jobs_are_read_off_calls(kind: str, given: dict[str, Any], expected: Any) -> None:
    spec = {"F": "random:flux", "S": "random:sd3", "P": "random:pixart-sigma"}[kind[0]]
    components = describe(spec).components
    job = job_of_call(getattr(diffusers, kind), None, 8, ("x",), given, components)
    assert {key: getattr(job, key) for key in expected} == expected


# -- memory


def _profile(spec: str, **job: Any) -> Any:
    description = architecture(spec)
    given = {"height": 256, "width": 256, "guided": not description.embeds_guidance, **job}
    return profile_job(description, Job(**given), dict.fromkeys(description.components, "float16"))


def _activations(profile: Any, phase: str) -> int:
    return next(p.reserved_bytes for p in profile.phases if p.name == phase)


@pytest.mark.parametrize("spec", ["random:sd3-tiny", "random:flux-tiny"])
def test_guidance_batch_size_and_text_reach_the_activations(spec: str) -> None:
    guided, plain = _profile(spec, guided=True), _profile(spec, guided=False)
    assert {p.numerics["guidance"] for p in (guided, plain)} == (
        {"batched", "off"} if "sd3" in spec else {"in turn", "embedded"}
    )

    def peak(profile: Any, phase: str = "denoise") -> float:
        return max(next(p.curve_mib for p in profile.phases if p.name == phase))

    large = _profile(spec, guided=False, height=384)
    assert peak(plain) < peak(guided)
    assert peak(plain) < peak(_profile(spec, guided=False, batch=2))
    assert peak(plain) < peak(large)
    assert peak(_profile(spec, guided=False, tokens=16)) < peak(plain)
    assert peak(_profile(spec, tokens=16), "text") < peak(guided, "text")
    assert [p.name for p in _profile(spec, encode=True).phases] == [
        "text",
        "encode",
        "denoise",
        "decode",
    ]


@pytest.mark.parametrize("spec", ["random:sd3-tiny", "random:flux-tiny"])
def test_a_second_step_takes_nothing_more(spec: str) -> None:
    # which is why one is traced
    description = architecture(spec)
    dtypes = dict.fromkeys(description.components, "float16")
    job = Job(384, 256, guided=True, tokens=100)
    call, modules, inputs, _ = phase_call("denoise", description, job, dtypes)
    fixed = [t for m in modules for t in (*m.parameters(), *m.buffers())]
    one, three = (trace.record(call, fixed=fixed, inputs=inputs, repeat=n)[0] for n in (1, 3))
    assert len(three) > 2 * len(one)
    assert reserved_peak(one) == reserved_peak(three)


def test_what_is_kept_in_fp32_is_counted_in_fp32() -> None:
    component = architecture("random:sd3-tiny").components["text_encoder_3"]
    meta, real = meta_component(component, "float16"), build_random_component(component, torch.half)
    dtypes = {name: p.dtype for name, p in real.named_parameters()}
    assert {n for n, d in dtypes.items() if d == torch.float32} == {
        n for n in dtypes if n.endswith(".wo.weight")
    }
    assert {name: p.dtype for name, p in meta.named_parameters()} == dtypes
    other = meta_component(component, "bfloat16")
    assert {p.dtype for p in other.parameters()} == {torch.bfloat16}


# -- plans


def test_sd3_medium_fits_into_8_gib() -> None:
    plan = sdx_accel.plan("random:sd3", vram=8, learn=False)
    assert plan.feasible
    assert plan.predicted_peak_gib <= 8
    # T5 alone is larger than that: its weights pass through a ring, the transformer's stay
    assert [stream.phase for stream in plan.streams] == ["text"]
    assert plan.job["tokens"] == 256
    assert plan.seconds_per_step > 0
    assert plan.smallest_budget_gib < 2.5
    # 2.03 G parameters of the transformer
    assert plan.phase("denoise").resident_gib["transformer"] == pytest.approx(
        2 * PUBLISHED["random:sd3"]["transformer"] / GIB, rel=0.05
    )


def test_a_step_of_two_predictions_in_turn_takes_twice_as_long() -> None:
    once, twice = (
        make_plan(_profile("random:flux-tiny", guided=guided), Machine.generic(), 8 * GIB)
        for guided in (False, True)
    )
    assert once.seconds_per_step > 0
    assert twice.seconds_per_step == pytest.approx(2 * once.seconds_per_step)


def test_flux_streams_below_its_size_and_stays_above() -> None:
    small, large = (sdx_accel.plan("random:flux", vram=n, learn=False) for n in (8, 30))
    assert small.feasible
    assert {stream.phase for stream in small.streams} == {"text", "denoise"}
    assert small.numerics["guidance"] == "embedded"
    assert large.feasible
    assert not large.streams
    assert small.seconds_per_step >= large.seconds_per_step
    everything = sum(2 * n for n in PUBLISHED["random:flux"].values())
    # T5 keeps 24 of its matrices in fp32
    assert large.host_gib == pytest.approx((everything + 24 * 2 * 4096 * 10240) / GIB, rel=0.01)


def test_a_size_beyond_the_positions_or_between_the_patches_is_refused() -> None:
    with pytest.raises(SizeError, match=r"height 4096 is more .* positions end at 3072"):
        sdx_accel.plan("random:sd3", vram=8, height=4096)
    for spec in ("random:sd3", "random:flux", "random:pixart-sigma"):
        with pytest.raises(SizeError, match="multiple of 16; the nearest: 992 or 1008"):
            sdx_accel.plan(spec, vram=8, width=1000)


@pytest.mark.parametrize("spec", ["random:sd3-tiny", "random:flux-tiny"])
def test_a_plan_by_name_is_that_of_the_live_pipeline(spec: str) -> None:
    size = {"height": 128, "width": 128}
    by_name = sdx_accel.plan(spec, vram=2, dtype="fp32", learn=False, **size)
    pipe = build(spec.removeprefix("random:").removesuffix("-tiny"))
    live = sdx_accel.plan(pipe, vram=2, dtype="fp32", learn=False, **size)
    assert live.phases == by_name.phases
    assert live.placement == by_name.placement
    # as it is held: from the weights themselves
    pipe.enable_xattn(vram=2, device="cpu")
    held = pipe.__dict__["_sdx_budget"]._planner.plan(
        Job(128, 128, guided="sd3" in spec, tokens=by_name.job["tokens"])
    )
    assert held.phases == by_name.phases


# -- what stays refused


def _changed(spec: str, **changes: Any) -> ModelDescription:
    import dataclasses

    description = architecture(spec)
    transformer = changes.pop("transformer", None)
    if transformer:
        part = dataclasses.replace(description.components["transformer"], **transformer)
        changes["components"] = {**description.components, "transformer": part}
    return dataclasses.replace(description, **changes)


@pytest.mark.parametrize(
    ("description", "said"),
    [
        (
            _changed("random:flux", pipeline_class="FluxKontextPipeline"),
            r"FluxKontextPipeline cannot be planned yet \(built: FluxPipeline, FluxImg2Img",
        ),
        (
            _changed("random:sd3", pipeline_class="StableDiffusion3PAGPipeline"),
            r"StableDiffusion3PAGPipeline cannot be planned yet \(built: StableDiffusion3Pipeline,",
        ),
        (
            _changed("random:sd3", transformer={"class_name": "LuminaNextDiT2DModel"}),
            r"LuminaNextDiT2DModel cannot be planned yet \(built: UNet2DConditionModel, SD3",
        ),
        (
            _changed(
                "random:flux", transformer={"adapters": [{"kind": "ip_adapter", "projections": []}]}
            ),
            r"image prompts on FluxTransformer2DModel cannot be planned yet \(built: LoRAs\)",
        ),
    ],
)
def test_what_is_not_known_is_refused_by_name(description: Any, said: str) -> None:
    with pytest.raises(RefusedError, match=rf"a budget for {said}.*enable_xattn\(\) without vram"):
        sdx_accel.plan(description, vram=8)


def test_image_prompts_of_a_live_sd3_are_refused() -> None:
    pipe = build("sd3")
    # what load_ip_adapter leaves on the transformer
    pipe.transformer.image_proj = torch.nn.Linear(4, 4)
    with pytest.raises(RefusedError, match="image prompts on SD3Transformer2DModel"):
        pipe.enable_xattn(vram=8, device="cpu")
