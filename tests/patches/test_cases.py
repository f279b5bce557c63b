"""Recipes of reported faults that go across several patches, from the users' own calls."""

import io
import multiprocessing
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionImg2ImgPipeline
from diffusers.models import attention_processor as host
from diffusers.models.attention_processor import Attention
from PIL import Image

import sdx_accel  # noqa: F401  (attaches enable_xattn)
import sdx_patches
from sdx_accel.errors import RefusedError
from sdx_patches.plain import SdxPlainAttnProcessor, SdxSlicedAttnProcessor

from .rows import controlnet_case
from .rows.check_case import TOLERANCE, difference, run, state
from .rows.test_rows import ROWS


def stock_processors(root: Any) -> dict[Attention, Any]:
    return {m: m.processor for m in root.modules() if isinstance(m, Attention)}


def test_case_070_two_pipelines_through_their_own_methods(tiny_sd: Any, latents: Any) -> None:
    first = tiny_sd()
    second = StableDiffusionImg2ImgPipeline.from_pipe(first)
    second.set_progress_bar_config(disable=True)
    picture = Image.new("RGB", (64, 64), (200, 30, 30))

    def both() -> list[torch.Tensor]:
        image = second(
            "a red house", image=picture, strength=0.9, num_inference_steps=2,
            generator=torch.Generator().manual_seed(7), output_type="latent",
        ).images  # fmt: skip
        return [latents(first), image]

    stock, processors = both(), stock_processors(first.unet)
    first.enable_xattn()
    second.enable_xattn()
    second.enable_xattn()
    first.disable_xattn()
    first.disable_xattn()
    assert all(layer.patched for layer in second.xattn_report().layers)
    assert [layer.path for layer in first.xattn_report().layers if not layer.patched] == []
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(both(), stock, strict=True))
    second.disable_xattn()
    assert stock_processors(first.unet) == processors
    assert all(torch.equal(a, b) for a, b in zip(both(), stock, strict=True))


@pytest.mark.parametrize("order", ["fuse first", "enable first"])
def test_case_086_changed_weights_act_as_in_the_hosts_own(
    tiny_unet: Any, unet_out: Any, order: str
) -> None:
    ours, twin = tiny_unet(), tiny_unet()
    if order == "enable first":
        sdx_patches.patch(ours, owner="test")
    for unet in (ours, twin):
        unet.fuse_qkv_projections()
    if order == "fuse first":
        sdx_patches.patch(ours, owner="test")
    assert torch.equal(unet_out(twin), unet_out(tiny_unet()))

    def change(name: str) -> None:
        for unet in (ours, twin):
            attn = next(m for m in unet.modules() if isinstance(m, Attention))
            with torch.no_grad():
                attn.get_parameter(f"{name}.weight").mul_(1.5)

    change("to_qkv")
    fused = unet_out(twin)
    assert not torch.allclose(fused, unet_out(tiny_unet()), atol=1e-3)
    assert torch.allclose(unet_out(ours), fused, atol=1e-4)
    for unet in (ours, twin):
        unet.unfuse_qkv_projections()
    change("to_q")
    split = unet_out(twin)
    assert not torch.allclose(split, fused, atol=1e-3)
    assert torch.allclose(unet_out(ours), split, atol=1e-4)
    sdx_patches.restore(ours, owner="test")
    assert torch.equal(unet_out(ours), split)


def test_case_087_a_budget_takes_over_from_slicing_and_never_slices(
    tiny_sd: Any, latents: Any
) -> None:
    pipe = tiny_sd()
    expected = latents(pipe)
    pipe.enable_attention_slicing(1)
    sliced = stock_processors(pipe.unet)
    assert {type(p) for p in sliced.values()} == {host.SlicedAttnProcessor}
    pipe.enable_xattn(vram=1, device="cpu")
    assert {type(p) for p in stock_processors(pipe.unet).values()} == {SdxSlicedAttnProcessor}
    assert torch.allclose(latents(pipe), expected, atol=1e-4)
    # as a user does who wants them off: no slices come back at the next run
    pipe.disable_attention_slicing()
    assert torch.allclose(latents(pipe), expected, atol=1e-4)
    assert {type(p) for p in stock_processors(pipe.unet).values()} == {SdxPlainAttnProcessor}
    pipe.disable_xattn()
    assert torch.allclose(latents(pipe), expected, atol=1e-4)


def in_another_process(saved: bytes, inputs: tuple[Any, ...], answers: Any) -> None:
    """What a spawned worker does with a UNet that it was given."""
    unet = torch.load(io.BytesIO(saved), weights_only=False)
    with torch.no_grad():
        answers.put(unet(*inputs).sample.numpy())
    answers.put([layer.running for layer in sdx_patches.layers(unet)])


def test_case_088_a_saved_unet_works_in_a_spawned_process(tiny_unet: Any) -> None:
    unet = tiny_unet()
    inputs = (torch.randn(1, 4, 8, 8), torch.tensor(10), torch.randn(1, 7, 32))
    sdx_patches.patch(unet, owner="test", attention_op="torch")
    with torch.no_grad():
        expected = unet(*inputs).sample
    saved = io.BytesIO()
    torch.save(unet, saved)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    worker = context.Process(target=in_another_process, args=(saved.getvalue(), inputs, answers))
    worker.start()
    out, running = answers.get(timeout=120), answers.get(timeout=120)
    worker.join()
    assert worker.exitcode == 0
    assert torch.allclose(torch.from_numpy(out), expected, atol=1e-5)
    assert set(running) == {layer.running for layer in sdx_patches.layers(unet)}


def test_case_090_several_controlnets_are_reached_and_given_back() -> None:
    row = next(row for row in controlnet_case.ROWS if row.name == "two controlnets")
    pipe = row.build()
    stock, before = run(row, pipe), state(pipe)
    pipe.enable_xattn()
    paths = [layer.path for layer in pipe.xattn_report().layers if layer.patched]
    counts = {
        part: sum(path.startswith(part) for path in paths)
        for part in ("controlnet.nets.0.", "controlnet.nets.1.", "unet.", "text_encoder.", "vae.")
    }
    assert all(counts.values())
    assert counts["controlnet.nets.0."] == counts["controlnet.nets.1."]
    assert len(paths) == sum(counts.values()) == len(pipe.xattn_report().layers)
    assert difference(run(row, pipe), stock) <= TOLERANCE
    report = str(pipe.xattn_report())
    assert all(f"{part}: " in report for part in ("controlnet", "unet", "text_encoder", "vae"))
    pipe.disable_xattn()
    assert state(pipe) == before
    assert difference(run(row, pipe), stock) == 0.0


@pytest.mark.parametrize("patched_already", [False, True])
def test_a_call_can_be_rolled_back_as_if_never_made(tiny_sd: Any, patched_already: bool) -> None:
    pipe = tiny_sd()
    stock = state(pipe)
    if patched_already:
        sdx_patches.patch(pipe, owner="a", attention_op="torch")
        sdx_patches.patch(pipe, owner="b", attention_op="reference")
    before, owners = state(pipe), sdx_patches.owners(pipe)
    wanted = [layer.requested for layer in sdx_patches.layers(pipe)]
    session = sdx_patches.patch(pipe, owner="a")
    if patched_already:
        assert [layer.requested for layer in sdx_patches.layers(pipe)] != wanted
    session.rollback()
    session.rollback()
    session.restore()
    assert [layer.requested for layer in sdx_patches.layers(pipe)] == wanted
    assert sdx_patches.owners(pipe) == owners
    assert state(pipe) == before
    for owner in owners:
        sdx_patches.restore(pipe, owner=owner)
    assert state(pipe) == stock


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("sd upscale", r"phase 'denoise' does not run by itself \(class_labels"),
        ("kolors", r"a budget for ChatGLMModel \(text_encoder\) cannot be planned yet"),
        ("stable cascade decoder", "has no unet or transformer and no vae"),
    ],
)
def test_pipelines_without_a_plan_say_so_and_stay_as_they_were(name: str, reason: str) -> None:
    pipe = next(row for row in ROWS if row.name == name).build()
    pipe.enable_xattn(attention_op="torch")
    before = state(pipe)
    with pytest.raises(RefusedError, match=rf"{reason}.*enable_xattn\(\) without vram works"):
        pipe.enable_xattn(vram=8)
    assert state(pipe) == before
    assert {layer.requested for layer in pipe.xattn_report().layers if layer.patched} == {"torch"}
    pipe.disable_xattn()


def test_a_size_that_cannot_be_planned_is_refused_at_its_call() -> None:
    row = next(row for row in ROWS if row.name == "sd latent upscale")
    pipe = row.build()
    pipe.enable_xattn(vram=8)
    with pytest.raises(RefusedError, match="phase 'denoise' does not run by itself"):
        run(row, pipe)
    pipe.disable_xattn()
    pipe.enable_xattn()
    run(row, pipe)
