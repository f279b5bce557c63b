"""The recipe of the demo model, on drawn shapes and a shrunken model: every piece, no network."""

import io
import json
import math
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn

RECIPE = Path(__file__).parents[2] / "examples" / "train_demo_model"
MODULES = (
    *("attention_choice", "captions", "compile_first", "data", "evaluate", "export", "flat"),
    *("model", "names", "nearest", "progress", "recolour", "sheet", "steps", "train"),
    *("tiers", "train_unet", "train_vae", "words"),
)
SHAPES = ("ball", "box", "roof", "ring")
COLOURS = {"red": (230, 40, 40), "green": (50, 190, 70), "blue": (40, 120, 240)}


@pytest.fixture(scope="module")
def recipe() -> Iterator[SimpleNamespace]:
    """The recipe's modules, importable as its scripts import each other; forgotten afterwards."""
    sys.path.insert(0, str(RECIPE))
    try:
        yield SimpleNamespace(**{name: __import__(name) for name in MODULES})
    finally:
        sys.path.remove(str(RECIPE))
        for name in MODULES:
            sys.modules.pop(name, None)


def draw(shape: str, colour: tuple[int, int, int]) -> Image.Image:
    picture = Image.new("RGB", (128, 128), "white")
    pen = ImageDraw.Draw(picture)
    box = (24, 24, 104, 104)
    if shape == "ball":
        pen.ellipse(box, fill=colour)
    elif shape == "box":
        pen.rectangle(box, fill=colour)
    elif shape == "roof":
        pen.polygon([(64, 20), (110, 110), (18, 110)], fill=colour)
    else:
        pen.ellipse(box, outline=colour, width=16)
    return picture


@pytest.fixture(scope="module")
def data(recipe: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four shapes, each in a colour of its own, packed as data.py packs the real pictures."""
    pictures, files = [], []
    for shape, colour in zip(SHAPES, [*COLOURS.values(), COLOURS["red"]], strict=True):
        packed = io.BytesIO()
        draw(shape, colour).save(packed, "PNG")
        files.append(packed.getvalue())
        texts = recipe.captions.captions_of(shape, shape, ["toy", "shape"])
        pictures.append(recipe.data.Picture(shape, shape, "objects", texts))
    merges = recipe.words.learn_merges([t for p in pictures for t in p.captions], 60)
    path = tmp_path_factory.mktemp("demo") / "data.npz"
    recipe.data.pack(path, files, pictures, merges)
    return path


@pytest.fixture
def small(recipe: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's classes with a few channels."""
    few = {"block_out_channels": [16] * 4, "norm_num_groups": 8}
    monkeypatch.setattr(recipe.model, "VAE", {**recipe.model.VAE, **few})
    few = {"block_out_channels": [16, 32, 32], "attention_head_dim": [1, 2, 2]}
    monkeypatch.setattr(recipe.model, "UNET", {**recipe.model.UNET, **few})


def test_the_model_fits_in_the_package(recipe: SimpleNamespace) -> None:
    with torch.device("meta"):
        parts = [recipe.model.build(n, 2560) for n in ("vae", *recipe.model.PROMPT_PARTS)]
    assert 2 * sum(p.numel() for part in parts for p in part.parameters()) <= 20 * 2**20


@pytest.mark.slow  # minutes
def test_the_whole_recipe_and_its_resumption(
    recipe: SimpleNamespace,
    data: Path,
    small: None,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from diffusers import StableDiffusionXLPipeline

    first, again = tmp_path / "first", tmp_path / "again"
    dry = ["--dry-run", "--data", str(data), "--attention"]
    more = ["--vae-attention", "auto", "--compile-first", "--out", str(first)]
    report = recipe.train.main([*dry, "auto", *more])
    assert "evaluation" in report, report.get("evaluation_failed")
    assert report["compiled_first"] == "done"
    assert "compiling: backward of 2 samples took" in capfd.readouterr().out
    assert report["vae"]["attention"]["chosen"] == "auto"
    assert report["unet"]["attention"]["chosen"] == "auto"
    assert report["unet"]["layers"]["sdpa"] > 0
    made = {file.name for file in first.iterdir()}
    assert made == {
        *("blind.png", "master-0.safetensors", "master-1.safetensors", "report.json"),
        *("rest.tar", "sheet.png", "unet.tar"),
    }
    written = json.loads((first / "report.json").read_text())
    assert written["unet"]["steps"] == 2
    assert "evaluation" in dict(written["parts"])
    more = ["--resume", str(first), "--vae-seconds", "0", "--out", str(again)]
    report = recipe.train.main([*dry, "stock", *more])
    assert "evaluation" in report, report.get("evaluation_failed")
    assert "steps" not in report["vae"]
    recipe.export.unpack(again, tmp_path / "model")
    # the files are fp16, and without a dtype the text encoders would stay so, but not the UNet
    pipe = StableDiffusionXLPipeline.from_pretrained(tmp_path / "model", torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    assert pipe("a red ball", num_inference_steps=1).images[0].size == (128, 128)


@pytest.mark.parametrize(
    ("wrong", "chosen"), [("backward", "stock"), ("name", "auto"), ("nothing", "auto")]
)
def test_attention_that_fails_its_check_is_not_trained_with(
    recipe: SimpleNamespace, wrong: str, chosen: str
) -> None:
    class Model(nn.Linear):
        factor = 1.0

        def enable_xattn(self, attention_op: Any = None) -> None:
            if attention_op == "nonsense":
                raise ValueError("no such operator")
            self.factor = 1.1 if wrong == "backward" else 1.0

    def loss(model: Any, dtype: torch.dtype) -> Tensor:
        out = model(torch.ones(2, 3, dtype=dtype))
        # the same value, and other gradients
        return (out * model.factor - (model.factor - 1.0) * out.detach()).square().mean()

    requested = "nonsense" if wrong == "name" else "auto"
    clock = recipe.progress.Clock(0.0)
    record = recipe.attention_choice.choose_attention(
        Model(3, 2), requested, loss, torch.float32, clock
    )
    assert record["chosen"] == chosen
    assert ("nonsense" in record["tried"]) is (wrong == "name")


def test_the_check_of_attention_says_each_part_before_and_after(
    recipe: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    class Model(nn.Linear):
        def enable_xattn(self, attention_op: Any = None) -> None:
            pass

    def loss(model: Any, dtype: torch.dtype) -> Tensor:
        return model(torch.ones(2, 3, dtype=dtype)).square().mean()

    clock = recipe.progress.Clock(0.0)
    recipe.attention_choice.choose_attention(Model(3, 2), "triton", loss, torch.bfloat16, clock)
    whole = "attention check of Model"
    parts = [
        f"  {model}, {way}"
        for model in ("stock float32", "stock bfloat16", "triton bfloat16")
        for way in ("forward", "backward")
    ]
    assert [name for name, _ in clock.parts] == [*parts, whole]
    lines = [
        re.sub(r"[0-9.]+ s", "N s", line.strip()) for line in capsys.readouterr().out.split("\n")
    ]
    wanted = [f"N s  {p} {end}" for p in parts for end in ("...", "took N s")]
    assert lines == [
        *(f"N s  {whole} ...", *wanted, f"N s  {whole} took N s"),
        *("N s  attention of Model: triton", ""),
    ]


def test_a_slow_part_is_named_while_it_runs(
    recipe: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    heard = threading.Event()

    class Clock(recipe.progress.Clock):  # type: ignore[name-defined,misc]
        def say(self, text: str) -> None:
            said.append(text)
            if "still at it" in text:
                heard.set()

    monkeypatch.setattr(recipe.progress, "SLOW_S", 0.01)
    clock = Clock(0.0)

    def stuck() -> None:
        with clock.part("a kernel"):
            assert heard.wait(30), "nothing was said"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        stuck()
    assert said[0] == "a kernel ..."
    assert said[1].startswith("a kernel: still at it, slow, after")
    assert said[-1].startswith("a kernel failed after")


def test_kernels_are_compiled_with_what_training_computes(
    recipe: SimpleNamespace, small: None, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--attention", "auto", "--device", "cpu", "--vocabulary", "600"]
    ran = recipe.compile_first.main([*arguments, "--samples", "1", "2"])
    # a transformer block with two attentions in each of 2 down, 1 mid and 4 up places
    assert ran["sdpa"] == 14
    assert ran["launches of sdpa"] >= 2 * 14
    printed = capsys.readouterr().out
    for samples in (1, 2):
        assert f"compiling: backward of {samples} samples took" in printed


@pytest.mark.parametrize(
    ("program", "seconds", "outcome"),
    [
        ("pass", 60.0, "done"),
        ("exit(1)", 60.0, "failed"),
        ("import time; time.sleep(600)", 0.0, "stuck"),
    ],
)
def test_a_compiling_process_that_is_stuck_is_ended(
    recipe: SimpleNamespace, program: str, seconds: float, outcome: str
) -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", program])
    try:
        found = recipe.compile_first.wait(process, recipe.progress.Clock(0.0), seconds)
        assert found == outcome
        assert process.poll() is not None
    finally:
        process.kill()
        process.wait()


def test_the_vae_keeps_stock_attention_unless_told(recipe: SimpleNamespace) -> None:
    options = recipe.train.parse(["--data", "a", "--out", "b"])
    assert (options.attention, options.vae_attention) == ("triton", "stock")
    assert not options.compile_first


def test_a_phase_ends_after_its_steps_or_with_its_loss(recipe: SimpleNamespace) -> None:
    loss, rate, rates = torch.zeros(()), torch.zeros(()), []
    clock, device = recipe.progress.Clock(0.0), torch.device("cpu")

    def step() -> None:
        rates.append(rate.item())
        loss.fill_(1.0 / len(rates))

    def run(seconds: float, **more: Any) -> dict[str, Any]:
        found = recipe.steps.run_for(seconds, step, rate, 1e-3, loss, device, clock, **more)
        assert isinstance(found, dict)
        return found

    assert run(math.inf, most_steps=100)["steps"] == len(rates) == 100
    assert max(rates) == pytest.approx(1e-3, rel=0.01)
    assert rates[-1] < 1e-5
    assert rates[0] == pytest.approx(1e-5)
    assert run(0.0)["steps"] == 0
    assert run(-1.0)["steps"] == 0
    loss_of = step

    def step() -> None:
        loss_of()
        loss.fill_(math.nan)

    assert run(math.inf, most_steps=100)["steps"] == 1


def test_both_phases_learn(recipe: SimpleNamespace, data: Path, small: None) -> None:
    """The mean weights, which are what is shipped, judge one fixed batch better than at first."""
    array, pictures, merges = recipe.data.load_data(data)
    # half the size: a quarter of the time
    pixels, clock = torch.from_numpy(array)[:, ::2, ::2], recipe.progress.Clock(math.inf)
    few = {"batch": 4, "dtype": torch.float32, "attention": "stock"}
    torch.manual_seed(0)

    vae = recipe.model.build("vae", 0)
    fixed = recipe.train_vae.to_unit(pixels, torch.float32)
    kernels = recipe.train_vae.sobel_kernels(pixels.device)

    def vae_loss() -> float:
        with torch.no_grad():
            return float(recipe.train_vae.vae_loss(vae, fixed, torch.zeros(4, 4, 8, 8), kernels))

    before = vae_loss()
    record = recipe.train_vae.train_vae(vae, pixels, math.inf, clock, most_steps=3, **few)
    assert record["steps"] == 3
    assert vae_loss() < before - 0.05
    vae.requires_grad_(False)

    material, coloured = recipe.train.make_material(vae, pixels, pictures, merges)
    assert len(material.latents) == len(pictures) + coloured
    size = len(recipe.words.make_tokenizer(merges))
    parts = {name: recipe.model.build(name, size) for name in recipe.model.PROMPT_PARTS}
    levels = recipe.train_unet.noise_levels(pixels.device)
    batch = recipe.train_unet.draw(material, 8, levels)

    def unet_loss(parts: dict[str, Any]) -> float:
        model = recipe.train_unet.TextAndUNet(**parts)
        with torch.no_grad():
            return float(recipe.train_unet.velocity_loss(model, batch, torch.float32))

    before = unet_loss(parts)
    words = parts["text_encoder"].get_input_embeddings()
    table = words.weight.clone()
    saved: list[dict[str, Any]] = []
    record, learnt = recipe.train_unet.train_unet(
        parts, material, math.inf, clock, save=lambda mean, flat: saved.append(mean),
        every=math.inf, most_steps=10, **few,
    )  # fmt: skip
    assert "ended_by" not in record
    assert saved == [learnt]
    assert unet_loss(learnt) < 0.9 * before
    assert not torch.equal(words.weight, table), "text encoders learn too"


def test_text_is_encoded_as_by_the_pipeline(
    recipe: SimpleNamespace, data: Path, small: None
) -> None:
    _, _, merges = recipe.data.load_data(data)
    size = len(recipe.words.make_tokenizer(merges))
    parts = {n: recipe.model.build(n, size).eval() for n in ("vae", *recipe.model.PROMPT_PARTS)}
    pipe = recipe.model.pipeline(parts, merges)
    ours = recipe.train_unet.TextAndUNet(pipe.text_encoder, pipe.text_encoder_2, pipe.unet)
    for text in ("a red ball", ""):
        with torch.no_grad():
            tokens = recipe.words.token_ids(pipe.tokenizer, [text])
            context, pooled = ours.encode(tokens)
            wanted, _, wanted_pooled, _ = pipe.encode_prompt(
                text, do_classifier_free_guidance=False
            )
        assert torch.allclose(context, wanted, atol=1e-5)
        assert torch.allclose(pooled, wanted_pooled, atol=1e-5)


@pytest.mark.parametrize("name", ["EulerDiscreteScheduler", "DDIMScheduler", "LCMScheduler"])
def test_a_perfect_velocity_leads_to_the_picture(recipe: SimpleNamespace, name: str) -> None:
    """What training asks of the UNet is what samplers take its output for."""
    import diffusers

    signal, noise = recipe.train_unet.noise_levels(torch.device("cpu"))
    clean, generator = torch.randn(1, 4, 16, 16), torch.Generator().manual_seed(0)
    scheduler = getattr(diffusers, name).from_config(recipe.model.SCHEDULER)
    scheduler.set_timesteps(10)
    sample = torch.randn(1, 4, 16, 16, generator=generator) * scheduler.init_noise_sigma
    for time in scheduler.timesteps:
        noisy = scheduler.scale_model_input(sample, time)
        a, b = signal[int(time)], noise[int(time)]
        velocity = a * (noisy - a * clean) / b - b * clean
        sample = scheduler.step(velocity, time, sample).prev_sample
    assert (sample - clean).abs().max() < 0.02


def test_the_flat_step_is_adamw(recipe: SimpleNamespace) -> None:
    torch.manual_seed(0)
    ours, theirs = nn.Linear(5, 3), nn.Linear(5, 3)
    theirs.load_state_dict(ours.state_dict())
    flat = recipe.flat.FlatWeights([ours], torch.float32, clip=1e9)
    flat.rate.fill_(1e-2)
    groups = [
        {"params": [theirs.weight], "weight_decay": 0.01},
        {"params": [theirs.bias], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.99))
    for _ in range(5):
        batch = torch.randn(7, 5)
        for module in (ours, theirs):
            module(batch).square().sum().backward()
        flat.step()
        adam.step()
        adam.zero_grad()
    assert torch.allclose(ours.weight, theirs.weight, atol=1e-6)
    assert torch.allclose(ours.bias, theirs.bias, atol=1e-6)
    before = flat.master.clone()
    flat.grads.fill_(float("nan"))
    flat.step()
    assert torch.isfinite(flat.master).all()
    assert (flat.master - before).abs().max() < 0.1


def test_weights_in_16_bits_follow_the_master(recipe: SimpleNamespace) -> None:
    layer = nn.Linear(5, 3)
    flat = recipe.flat.FlatWeights([layer], torch.bfloat16)
    flat.rate.fill_(0.1)
    layer(torch.ones(2, 5, dtype=torch.bfloat16)).sum().backward()
    before = layer.weight.clone()
    flat.step()
    assert not torch.equal(layer.weight, before)
    assert torch.equal(layer.weight, flat.views(flat.master)[0].bfloat16())


def test_frequent_words_become_tokens_and_any_text_can_be_encoded(recipe: SimpleNamespace) -> None:
    tokenizer = recipe.words.make_tokenizer(recipe.words.learn_merges(["a red ball", "red"], 5))
    assert tokenizer.tokenize("a red ball") == ["a</w>", "red</w>", "ball</w>"]
    assert tokenizer.tokenize("bar") == ["ba", "r</w>"]
    assert tokenizer.decode(tokenizer("schön 🙂").input_ids, skip_special_tokens=True) == "schön 🙂"
    assert tokenizer.eos_token_id == len(tokenizer) - 1 == 2 * 256 + 5 + 1


def test_icons_are_described_by_their_characters(recipe: SimpleNamespace, tmp_path: Path) -> None:
    icons = ("hand", "hand-medium-dark", "traffic-light", "no-character")
    hand = {"hexcode": "270B", "label": "raised hand", "tags": ["stop"], "group": 1}
    light = {"hexcode": "1F6A6", "label": "traffic light", "tags": ["signal"]}
    files: dict[str, Any] = {
        "icons.json": {"icons": {icon: {} for icon in icons}},
        "chars.json": {"270b-fe0f": icons[0], "270b-1f3fe": icons[1], "1f6a6": icons[2]},
        "meta/groups.json": {"groups": {"1": "people-body"}},
        "en/data.json": [{**hand, "skins": [{"hexcode": "270B-1F3FE"}]}, light],
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    found = recipe.data.describe(tmp_path, tmp_path)
    assert [(p.name, p.base, p.group) for p in found.values()] == [
        ("hand", "hand", "people-body"),
        ("hand medium dark skin tone", "hand", "people-body"),
        ("traffic light", "traffic light", "other"),
    ]
    assert {"a hand", "raised hand", "hand stop"} <= set(found["hand"].captions)
    assert all("medium dark skin tone" in text for text in found[icons[1]].captions)


def test_normalised_latents_decode_to_the_same_pictures(
    recipe: SimpleNamespace, data: Path, small: None
) -> None:
    pixels = torch.from_numpy(recipe.data.load_data(data)[0])
    vae = recipe.model.build("vae", 0).requires_grad_(False).eval()
    before = vae.decode(recipe.train_vae.encode(vae, pixels)).sample
    recipe.train_vae.normalise(vae, pixels)
    latents = recipe.train_vae.encode(vae, pixels)
    assert torch.allclose(vae.decode(latents).sample, before, atol=1e-4)
    assert latents.mean((0, 2, 3)).abs().max() < 1e-3
    assert (latents.std((0, 2, 3)) - 1.0).abs().max() < 1e-3


def pixels_of(shape: str, colour: str) -> Tensor:
    import numpy as np

    return torch.from_numpy(np.asarray(draw(shape, COLOURS[colour])).copy())


def test_colours_change_and_held_out_pairs_stay_out(recipe: SimpleNamespace, data: Path) -> None:
    array, pictures, _ = recipe.data.load_data(data)
    pixels = torch.from_numpy(array)
    seen, unseen = recipe.recolour.plan_colours(pixels, pictures)
    pairs = {(change.name, change.colour) for change in seen}
    assert len(pairs) == len(seen) == 4 * len(SHAPES)
    assert not pairs & {(change.name, change.colour) for change in unseen}
    assert ("ball", "red") not in pairs, "its own colour"
    for change, picture in zip(seen, recipe.recolour.recolour(pixels, seen), strict=True):
        hue = recipe.captions.COLOURS[change.colour][0]
        assert recipe.nearest.colour_share(picture, hue) > 0.95, change
        assert (picture[0] == 255).all(), "white stays white"


@pytest.mark.parametrize("measure", ["pixels", "histogram", "edges"])
def test_the_nearest_picture_is_the_same_shape(recipe: SimpleNamespace, measure: str) -> None:
    gallery = torch.stack([pixels_of(shape, "red") for shape in SHAPES])
    moved = gallery.roll((2, 1), dims=(1, 2))
    assert recipe.nearest.nearest(measure, moved, gallery, None).tolist() == [0, 1, 2, 3]


def test_a_wrong_name_counts_as_wrong(recipe: SimpleNamespace, small: None) -> None:
    gallery = torch.stack([pixels_of(shape, "red") for shape in SHAPES])
    known = recipe.evaluate.Gallery(gallery, list(SHAPES), list(SHAPES), len(SHAPES))
    vae = recipe.model.build("vae", 0).eval()
    names = ["ball", "box", "ring", "roof"]  # the last two are swapped
    judged: dict[str, Any] = recipe.evaluate.judge_names(gallery, names, known, vae)
    for measure, entry in judged.items():
        assert entry["right"] == 0.5, measure
        assert entry["wrong"] == ["ring -> roof", "roof -> ring"], measure
        assert entry["distinct"] == 4, measure


def test_the_names_of_the_evaluation_are_what_the_rules_ask_for(recipe: SimpleNamespace) -> None:
    fixed = json.loads(recipe.names.FILE.read_text())
    assert len(set(fixed["names"])) == 200
    assert len(fixed["blind"]) == 48
    assert all(e["name"] in e["choices"] and len(set(e["choices"])) == 10 for e in fixed["blind"])
    assert len({tuple(pair) for pair in fixed["unseen"]}) == 60


def test_skin_tones_and_colours_are_drawn_seldom(recipe: SimpleNamespace) -> None:
    plain = recipe.data.Picture("hand", "hand", "people-body")
    toned = recipe.data.Picture("hand dark skin tone", "hand", "people-body")
    counts = torch.bincount(recipe.train.drawing_table([plain, toned], coloured=1)).tolist()
    assert counts[1] / counts[0] == pytest.approx(recipe.train.TONE_WEIGHT, rel=0.01)
    assert counts[2] / counts[0] == pytest.approx(recipe.train.COLOUR_WEIGHT, rel=0.01)
