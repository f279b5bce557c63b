"""`--controlnet`: the same picture as diffusers' own pipelines, planned, held and replayed."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import sdx_accel
from sdx_accel.budget.machine import Machine
from sdx_accel.errors import CheckpointError, RefusedError
from sdx_accel.runtime import budget_session
from sdx_accel.runtime.architectures import architecture
from sdx_accel.runtime.checkpoints import describe_pipeline, load
from sdx_accel.runtime.controlnets import load_controlnet, with_controlnets
from sdx_accel.runtime.executor import Executor
from sdx_accel.runtime.pipeline_parts import pipeline_models
from sdx_accel.runtime.planning import job_of_call

Cli = Callable[..., Any]
RANDOM = "random:controlnet"
SMALL = ("--width", 64, "--height", 64, "--steps", 2, "--seed", 3)


def pixels(path: Path) -> np.ndarray[Any, Any]:
    with Image.open(path) as picture:
        return np.asarray(picture).astype(int)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """in.png, mask.png (right half), edges.png and depth.png, all 64 × 64."""
    rng = np.random.default_rng(0)
    for name in ("in", "edges", "depth"):
        values = rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(values).save(tmp_path / f"{name}.png")
    mask = Image.new("L", (64, 64))
    mask.paste(255, (32, 0, 64, 64))
    mask.save(tmp_path / "mask.png")
    return tmp_path


def nets_of(model: str, number: int) -> tuple[Any, list[Any]]:
    description = with_controlnets(architecture(model), [RANDOM] * number, "text")
    names = ["controlnet", "controlnet_2"][:number]
    return description, [
        load_controlnet(RANDOM, description.components[name], torch.float32) for name in names
    ]


@pytest.mark.parametrize(
    ("model", "kind", "flags"),
    [
        ("sdxl", "text", []),
        ("sdxl", "image", ["--image", "in.png"]),
        ("sdxl", "inpaint", ["--image", "in.png", "--mask", "mask.png"]),
        pytest.param("sd15", "text", [], marks=pytest.mark.slow),
        pytest.param("sd15", "image", ["--image", "in.png"], marks=pytest.mark.slow),
        pytest.param(
            "sd15", "inpaint", ["--image", "in.png", "--mask", "mask.png"], marks=pytest.mark.slow
        ),
    ],
)
def test_pictures_are_those_of_diffusers(
    cli: Cli, pictures: Path, model: str, kind: str, flags: list[str]
) -> None:
    import diffusers

    result = cli(
        "generate", "a cat", "--model", f"random:{model}-tiny", *SMALL, *flags,
        "--controlnet", f"{RANDOM}:0.7", "--control-image", "edges.png",
    )  # fmt: skip
    assert result.code == 0, result.err
    pipe = load(f"random:{model}-tiny", dtype="fp32")
    _, (net,) = nets_of(f"random:{model}-tiny", 1)
    family = "StableDiffusionXL" if model == "sdxl" else "StableDiffusion"
    task = {"text": "", "image": "Img2Img", "inpaint": "Inpaint"}[kind]
    name = f"{family}ControlNet{task}Pipeline"
    assert name in result.out
    parts = {key: value for key, value in pipe.components.items() if value is not None}
    extra = {"add_watermarker": False} if model == "sdxl" else {"requires_safety_checker": False}
    if model == "sd15":
        parts |= {"safety_checker": None, "feature_extractor": None}
    stock = getattr(diffusers, name)(**parts, controlnet=net, **extra)
    stock.set_progress_bar_config(disable=True)
    edges = Image.open("edges.png")
    arguments: dict[str, Any] = {"width": 64, "height": 64, "image": edges}
    if kind != "text":
        arguments = {"image": Image.open("in.png"), "control_image": edges, "strength": 0.6}
    if kind == "inpaint":
        arguments |= {"mask_image": Image.open("mask.png"), "width": 64, "height": 64}
    picture = stock(
        "a cat",
        num_inference_steps=2,
        guidance_scale=5.0 if model == "sdxl" else 7.5,
        controlnet_conditioning_scale=0.7,
        generator=torch.Generator().manual_seed(3),
        **arguments,
    ).images[0]
    expected = np.asarray(picture).astype(int)
    if kind == "inpaint":
        expected[:, :32] = pixels(Path("in.png"))[:, :32]
    # ours is another attention kernel: rounding may move a value over the border of a level
    assert abs(pixels(result.paths[0]) - expected).max() <= 1


def test_two_follow_their_own_pictures_and_a_replay_asks_for_the_same_ones(
    cli: Cli, pictures: Path
) -> None:
    line = ("generate", "a cat", "--model", "random:sdxl-tiny", *SMALL, "--vram", 6)
    nets = ("--controlnet", RANDOM, "--controlnet", f"{RANDOM}:0.5")
    both = ("--control-image", "edges.png", "--control-image", "depth.png")
    first = cli(*line, *nets, *both, "--json")
    assert first.code == 0, first.err
    values = json.loads(first.out)
    (path,) = values["paths"]
    assert values["settings"]["controlnets"] == [
        {"path": RANDOM, "scale": 1.0, "image": str(pictures / "edges.png")},
        {"path": RANDOM, "scale": 0.5, "image": str(pictures / "depth.png")},
    ]
    assert values["report"]["plan"]["budget_gib"] == 6.0
    assert "not enforced on CPU" in values["report"]["plan"]["notes"]
    assert {"controlnet", "controlnet_2"} <= values["report"]["plan"]["numerics"].keys()
    layers = {layer["path"].split(".")[0] for layer in values["report"]["layers"]}
    assert "controlnet" in layers
    again = cli("generate", "--from", path)
    assert again.code == 0, again.err
    assert (pixels(again.paths[0]) == pixels(path)).all()
    swapped = cli("generate", "--from", path, *reversed(both[::2]), "--control-image", "edges.png")
    assert swapped.code == 2
    assert "--control-image" in swapped.err
    order = ("--control-image", "depth.png", "--control-image", "edges.png")
    other = cli("generate", "--from", path, *order)
    assert other.code == 0, other.err
    assert (pixels(other.paths[0]) != pixels(path)).any()
    # other strengths keep the recorded pictures, and none at all is no ControlNet
    muted = cli("generate", "--from", path, *("--controlnet", f"{RANDOM}:0") * 2, "--json")
    values = json.loads(muted.out)
    found = [(net["scale"], Path(net["image"]).name) for net in values["settings"]["controlnets"]]
    assert found == [(0.0, "edges.png"), (0.0, "depth.png")]
    plain = cli(*line)
    assert (pixels(values["paths"][0]) == pixels(plain.paths[0])).all()
    Image.new("RGB", (64, 64)).save("depth.png")
    changed = cli("generate", "--from", path)
    assert changed.code == 2
    assert "depth.png has changed since" in changed.err
    assert "give --control-image" in changed.err
    (pictures / "depth.png").unlink()
    assert "--control-image" in cli("generate", "--from", path).err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--controlnet random:controlnet", "give --control-image PICTURE"),
        ("--control-image edges.png", "give --controlnet too"),
        (
            "--controlnet random:controlnet --control-image edges.png --control-image depth.png",
            "1 --controlnet and 2 --control-image",
        ),
        ("--controlnet random:controlnet-tiny --control-image edges.png", "random:controlnet"),
        ("--controlnet absent/x/y --control-image edges.png", "absent"),
        ("--controlnet random:controlnet:nan --control-image edges.png", "finite"),
        ("--controlnet random:controlnet --control-image absent.png", "no such file"),
        ("--controlnet text.safetensors --control-image edges.png", "is a single file"),
        ("--controlnet random:controlnet --control-image odd.png", "odd.png is 65 × 64 pixels"),
        ("--controlnet union --control-image edges.png", "built: ControlNetModel"),
        ("--controlnet sd15 --control-image edges.png", "use a ControlNet for SDXL"),
        ("--controlnet hollow --control-image edges.png", "has no weights"),
    ],
)
def test_refused_before_any_weights(
    cli: Cli, pictures: Path, monkeypatch: pytest.MonkeyPatch, flags: str, message: str
) -> None:
    monkeypatch.setattr(
        "sdx_accel.runtime.checkpoints.load", lambda *a, **k: pytest.fail("a model was loaded")
    )
    Path("text.safetensors").write_text("x")
    Image.new("RGB", (65, 64)).save("odd.png")
    shape = with_controlnets(architecture("random:sdxl"), [RANDOM], "text")
    config = shape.components["controlnet"].config
    for name, change in (
        ("union", {"_class_name": "ControlNetUnionModel"}),
        ("sd15", {"_class_name": "ControlNetModel", "cross_attention_dim": 768}),
        ("hollow", {"_class_name": "ControlNetModel"}),
    ):
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps({**config, **change}))
    result = cli("generate", "x", "--model", "random:sdxl", *flags.split())
    assert result.code == 2
    assert message in result.err
    lines = [line for line in result.err.splitlines() if not line.startswith("note: ")]
    assert len(lines) == 1


def test_a_folder_is_loaded_and_is_the_same_net(tmp_path: Path) -> None:
    _, (net,) = nets_of("random:sdxl-tiny", 1)
    net.save_pretrained(tmp_path / "net")
    found = with_controlnets(architecture("random:sdxl-tiny"), [str(tmp_path / "net")], "inpaint")
    assert found.pipeline_class == "StableDiffusionXLControlNetInpaintPipeline"
    assert found.weight_files["controlnet"][0][1] > 100_000
    again = load_controlnet(str(tmp_path / "net"), found.components["controlnet"], torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), again.parameters(), strict=True))
    with pytest.raises(CheckpointError, match="cross_attention_dim is 160"):
        with_controlnets(architecture("random:sd15-tiny"), [str(tmp_path / "net")], "text")
    changed = replace(architecture("random:sdxl-tiny"), pipeline_class="FluxPipeline")
    with pytest.raises(RefusedError, match="SDXL models"):
        with_controlnets(changed, [RANDOM], "text")


def test_a_model_saved_with_its_controlnet_gives_the_controlnet(cli: Cli, model: Path) -> None:
    _, (net,) = nets_of("random:sdxl-tiny", 1)
    net.save_pretrained(model / "controlnet")
    whole = with_controlnets(architecture("random:sdxl-tiny"), [str(model)], "text")
    assert whole.weight_files["controlnet"][0][0].startswith(str(model / "controlnet"))
    index = json.loads((model / "model_index.json").read_text())
    index["_class_name"] = "StableDiffusionXLControlNetPipeline"
    index["controlnet"] = ["diffusers", "ControlNetModel"]
    (model / "model_index.json").write_text(json.dumps(index))
    refused = cli("generate", "x", "--model", model)
    assert refused.code == 2
    assert "and this one with --controlnet" in refused.err


def test_a_hub_id_comes_from_the_cache_and_offline_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    _, (net,) = nets_of("random:sdxl-tiny", 1)
    root, commit = tmp_path / "cache" / "models--owner--net", "0" * 40
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(commit)
    net.save_pretrained(root / "snapshots" / commit)
    found = with_controlnets(architecture("random:sdxl-tiny"), ["owner/net"], "text")
    again = load_controlnet("owner/net", found.components["controlnet"], torch.float32)
    assert torch.equal(net.conv_in.weight, again.conv_in.weight)
    (root / "snapshots" / commit / "diffusion_pytorch_model.safetensors").unlink()
    found = with_controlnets(architecture("random:sdxl-tiny"), ["owner/net"], "text")
    with pytest.raises(CheckpointError, match="has no weights"):
        load_controlnet("owner/net", found.components["controlnet"], torch.float32)
    with pytest.raises(CheckpointError, match=r"--controlnet owner/other: .*HF_HUB_OFFLINE"):
        with_controlnets(architecture("random:sdxl-tiny"), ["owner/other"], "text")


def test_random_weights_depend_on_the_place_only() -> None:
    _, (one,) = nets_of("random:sdxl-tiny", 1)
    _, (first, second) = nets_of("random:sdxl-tiny", 2)
    name = "controlnet_mid_block.weight"
    assert torch.equal(one.get_parameter(name), first.get_parameter(name))
    assert not torch.equal(first.get_parameter(name), second.get_parameter(name))
    # a new ControlNet starts with zeros there, and would do nothing
    assert first.get_parameter(name).std() > 0.01


def test_plan_counts_the_nets_their_pictures_and_residuals(cli: Cli, pictures: Path) -> None:
    def plan(*flags: Any) -> Any:
        result = cli("plan", "--model", "random:sdxl-tiny", *flags, "--json")
        assert result.code == 0, result.err
        said.append(result.err)
        return sdx_accel.Plan.from_json(result.out)

    said: list[str] = []
    small = ("--width", 64, "--height", 64)
    none, two = plan(*small), plan(*small, "--controlnet", RANDOM, "--controlnet", RANDOM)
    # its layers that read the text lie in a unit of their own
    assert two.phase("denoise").resident_units["controlnet_2"] == "2/2"
    assert none.phase("decode").activations_gib == two.phase("decode").activations_gib
    _, nets = nets_of("random:sdxl-tiny", 2)
    bytes_of_nets = sum(p.numel() * 2 for net in nets for p in net.parameters())
    assert two.host_gib - none.host_gib == pytest.approx(bytes_of_nets / 2**30, abs=2e-4)
    assert "controlnet_2" in two.explain()
    wide = Image.open("edges.png").resize((72, 64))
    wide.putalpha(200)
    wide.save("wide.png")
    sized = plan("--controlnet", RANDOM, "--control-image", "wide.png")
    assert (sized.job["width"], sized.job["height"]) == (72, 64)
    assert "over white" in said[-1]


def test_residuals_stay_between_net_and_unet() -> None:
    from sdx_accel.runtime.profiler import Job, profile_job

    def peak(description: Any) -> int:
        dtypes = dict.fromkeys(description.components, "float32")
        profile = profile_job(description, Job(512, 512), dtypes)
        (denoise,) = [p for p in profile.phases if p.name == "denoise"]
        live = most = 0
        for kind, _, n_bytes in denoise.events:
            live += kind * n_bytes
            most = max(most, live)
        return most

    plain = architecture("random:sdxl-tiny")
    steered = with_controlnets(plain, [RANDOM], "text")
    picture = 2 * 3 * 512 * 512 * 4
    # 64² × 32 after conv_in and resnet, 32² × 32 after the downsampler, …: what a UNet skips to
    residuals = (
        2 * 4 * (2 * 64 * 64 * 32 + 32 * 32 * (32 + 64) + 16 * 16 * (64 + 64) + 16 * 16 * 64)
    )
    assert peak(steered) >= peak(plain) + picture + residuals


def test_the_smallest_budget_is_the_edge() -> None:
    def plan(gib: float) -> Any:
        return sdx_accel.plan(
            "random:sdxl-tiny", controlnets=[RANDOM], vram=gib, machine=Machine.generic()
        )

    smallest = plan(8).smallest_budget_gib
    assert plan(smallest).feasible
    assert not plan(smallest - 0.06).feasible


def test_case_090_a_held_pipeline_with_two_nets_keeps_its_pixels(
    monkeypatch: pytest.MonkeyPatch, pictures: Path
) -> None:
    from diffusers import StableDiffusionXLControlNetPipeline

    class Moving(Executor):
        def __init__(self, *args: Any, moves: bool) -> None:
            super().__init__(*args, moves=True)

    monkeypatch.setattr(budget_session, "Executor", Moving)
    description, nets = nets_of("random:sdxl-tiny", 2)
    base = load("random:sdxl-tiny", dtype="fp32")
    pipe = StableDiffusionXLControlNetPipeline(
        **{k: v for k, v in base.components.items() if v is not None},
        controlnet=nets,
        add_watermarker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    edges = [Image.open(pictures / "edges.png"), Image.open(pictures / "depth.png")]

    def run() -> Any:
        return pipe(
            "a cat", image=edges, num_inference_steps=2, output_type="np",
            generator=torch.Generator().manual_seed(0),
        ).images  # fmt: skip

    pipe.enable_xattn()
    patched = {layer.path[:17] for layer in pipe.xattn_report().layers if layer.patched}
    assert {"controlnet.nets.0", "controlnet.nets.1"} <= patched
    free = run()
    pipe.enable_xattn(vram=8, device="cpu")
    assert (run() == free).all()
    session = pipe.__dict__["_sdx_budget"]
    assert session.executor.moved_bytes > 0
    # the call without sizes follows the control pictures, not the model's 128 × 128
    assert (session.plan.job["width"], session.plan.job["encode"]) == (64, False)
    live = describe_pipeline(pipe)
    assert list(live.components) == list(pipeline_models(pipe))
    planned = sdx_accel.plan(description, vram=8, width=64, height=64, dtype="fp32",
                             machine=Machine.generic())  # fmt: skip
    assert planned.smallest_budget_gib == session.plan.smallest_budget_gib
    pipe.disable_xattn()
    # diffusers' own attention again: rounded in another order
    assert abs(run() - free).max() < 1e-3


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("StableDiffusionXLControlNetPipeline", {"image": (72, 40)}, (40, 72, False)),
        ("StableDiffusionXLControlNetPipeline", {"image": (72, 40), "height": 64, "width": 64},
         (64, 64, False)),
        ("StableDiffusionControlNetImg2ImgPipeline",
         {"image": (72, 40), "control_image": (72, 40)}, (40, 72, True)),
        ("StableDiffusionXLControlNetInpaintPipeline",
         {"image": (64, 64), "control_image": (64, 64), "mask_image": (64, 64)}, (64, 64, True)),
    ],
)  # fmt: skip
def test_jobs_are_read_off_calls(
    name: str, arguments: dict[str, Any], expected: tuple[int, int, bool]
) -> None:
    import diffusers

    made = {k: Image.new("RGB", v) if isinstance(v, tuple) else v for k, v in arguments.items()}
    unet = load("random:sd15-tiny").unet.config
    job = job_of_call(getattr(diffusers, name), unet, 8, ("x",), made)
    assert (job.height, job.width, job.encode) == expected
