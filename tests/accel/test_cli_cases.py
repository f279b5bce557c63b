"""Recipes of reported faults, played in full through the command line."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionXLInpaintPipeline, UNet2DConditionModel
from PIL import Image

from sdx_accel.runtime.checkpoints import load
from sdx_accel.runtime.folder_loading import quiet_libraries

Cli = Callable[..., Any]
TINY, REFINER = "random:sdxl-tiny", "random:sdxl-refiner-tiny"
SMALL = ("--width", 64, "--height", 64, "--steps", 2, "--seed", 3)


def pixels(path: Path) -> np.ndarray[Any, Any]:
    with Image.open(path) as picture:
        return np.asarray(picture).astype(int)


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(embeddings, pooled embeddings) of every UNet call; negative prompt first."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    forward = UNet2DConditionModel.forward

    def spy(self: Any, sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if sample.device.type != "meta":
            embeddings = kwargs["encoder_hidden_states"]
            seen.append((embeddings, kwargs["added_cond_kwargs"]["text_embeds"]))
        return forward(self, sample, *args, **kwargs)

    monkeypatch.setattr(UNet2DConditionModel, "forward", spy)
    return seen


def test_case_123_any_length_beside_any_other(
    cli: Cli, texts: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """Each row depends on its own words alone, and on no more of them than the encoders read."""
    tokenizer = load(TINY).tokenizer
    # three tokens a word: 25 of them are what goes between the first token and the last
    room = 25
    for word in ("cat", "dog"):
        assert len(tokenizer(f"{word} " * room).input_ids) == tokenizer.model_max_length == 77
    found: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
    for words, negative in itertools.product((10, 80, 200, room), (0, 5, 160, room)):
        texts.clear()
        flags = ("--negative", "dog " * negative) if negative else ()
        result = cli("generate", "cat " * words, "--model", TINY, *SMALL[:4], "--steps", 1, *flags)
        assert result.code == 0, result.err
        assert ("the prompt is longer" in result.err) == (words > room)
        assert ("the negative prompt is longer" in result.err) == (negative > room)
        (found[words, negative],) = texts
    for (words, negative), (embeddings, pooled) in found.items():
        # both encoders, 64 and 96 wide, side by side
        assert embeddings.shape == (2, 77, 160)
        assert pooled.shape[0] == 2
        for of_both in (0, 1):
            rows = [found[words, negative][of_both]]
            prompt = found[min(words, room), 0][of_both]
            unwanted = found[10, min(negative, room)][of_both]
            assert torch.equal(rows[0][1], prompt[1])
            assert torch.equal(rows[0][0], unwanted[0])
    assert not torch.equal(found[10, 0][0][1], found[80, 0][0][1])
    assert not torch.equal(found[10, 5][0][0], found[10, 160][0][0])


def test_case_128_both_of_two_refined_pictures_equal_their_single_runs(cli: Cli) -> None:
    line = ("generate", "a cat", "--model", TINY, "--width", 64, "--height", 64, "--steps", 5)
    flags = ("--refiner", REFINER, "--refiner-start", 0.6)
    pair = cli(*line, *flags, "--num", 2, "--seed", 5)
    assert pair.code == 0, pair.err
    singles = [cli(*line, *flags, "--seed", seed) for seed in (5, 6)]
    for made, single in zip(pair.paths, singles, strict=True):
        assert (pixels(made) == pixels(single.paths[0])).all()
    assert (pixels(pair.paths[0]) != pixels(pair.paths[1])).any()


@pytest.mark.parametrize("refined", [False, True])
@pytest.mark.parametrize("budget", [{}, {"vram": 8, "device": "cpu"}])
def test_case_128_generators_that_do_not_match_are_counted(
    refined: bool, budget: dict[str, Any]
) -> None:
    from sdx_accel.runtime.architectures import architecture
    from sdx_accel.runtime.refiner import join_refiner, with_refiner

    pipe = load(TINY, dtype="fp32")
    if refined:
        pipe = join_refiner(pipe, REFINER, with_refiner(architecture(TINY), REFINER))
    pipe.set_progress_bar_config(disable=True)
    pipe.enable_xattn(**budget)
    with pytest.raises(ValueError, match=r"length 2\b.*size of 3\b"):
        pipe(
            "a cat", num_images_per_prompt=3, height=64, width=64, num_inference_steps=5,
            generator=[torch.Generator().manual_seed(seed) for seed in range(2)],
        )  # fmt: skip


def test_case_092_a_model_made_for_inpainting_leaves_the_rest_alone(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine input channels: the latents, the mask, and the latents of the masked picture."""
    parts = load(TINY, dtype="fp32").components
    torch.manual_seed(0)
    parts["unet"] = UNet2DConditionModel.from_config({**parts["unet"].config, "in_channels": 9})
    with quiet_libraries():
        StableDiffusionXLInpaintPipeline(**parts).save_pretrained(tmp_path / "paint")
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save("in.png")
    mask = Image.new("L", (64, 64))
    mask.paste(255, (32, 0, 64, 64))
    mask.save("mask.png")
    line = ("generate", "x", "--model", tmp_path / "paint", *SMALL, "--image", "in.png")
    ours = cli(*line, "--mask", "mask.png")
    assert ours.code == 0, ours.err
    made = pixels(ours.paths[0])
    assert (made[:, :32] == noise[:, :32]).all()
    assert (made[:, 32:] != noise[:, 32:]).mean() > 0.5
    monkeypatch.setenv("SDX_DISABLE", "1")
    stock = cli(*line, "--mask", "mask.png")
    assert stock.code == 0, stock.err
    assert abs(pixels(stock.paths[0]) - made).max() <= 1
