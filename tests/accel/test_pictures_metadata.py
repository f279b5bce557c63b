"""What a picture says about how it was made, in all three formats."""

import json
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from sdx_accel.cli.adapter_flags import Lora
from sdx_accel.cli.job import Job
from sdx_accel.cli.metadata import encode_picture, parameters_text, read_record, versions
from sdx_accel.errors import PictureError

JOB = Job("日本, a cat 🙂\nsecond line", "random:sdxl-tiny", 64, 72, 4, 5.0, 7, negative="dög")
PICTURE = Image.linear_gradient("L").resize((64, 72)).convert("RGB")
FORMATS = ["png", "jpg", "webp"]


def record_of(job: Job, **more: Any) -> dict[str, Any]:
    return {"settings": job.to_dict(), "versions": versions(), "inputs": {"/i.png": "00"}, **more}


def write(folder: Path, format: str, job: Job = JOB, **more: Any) -> tuple[Path, str | None]:
    text = parameters_text(job, "EulerDiscrete")
    data, note = encode_picture(PICTURE, format, record_of(job, **more), text)
    path = folder / f"модель 🙂.{format}"
    path.write_bytes(data)
    return path, note


@pytest.mark.parametrize("format", FORMATS)
def test_settings_come_back(tmp_path: Path, format: str) -> None:
    path, note = write(tmp_path, format, plan={"budget_gib": 8.0})
    recorded = read_record(str(path))
    assert note is None
    assert (recorded.job, recorded.format) == (JOB, format)
    assert recorded.inputs == {"/i.png": "00"}
    assert recorded.versions == versions()


@pytest.mark.parametrize("format", FORMATS)
def test_parameters_text_is_where_other_tools_look(tmp_path: Path, format: str) -> None:
    path, _ = write(tmp_path, format)
    with Image.open(path) as picture:
        if format == "png":
            found = picture.info["parameters"]
        else:
            comment = picture.getexif().get_ifd(0x8769)[0x9286]
            assert comment[:8] == b"UNICODE\0"
            found = comment[8:].decode("utf-16-be")
    assert found == parameters_text(JOB, "EulerDiscrete")


def test_parameters_text() -> None:
    job = replace(
        JOB,
        prompt="a cat",
        model="/models/my, model",
        loras=(Lora("/l/style.safetensors", 0.8),),
        image="/i.png",
        strength=0.5,
    )
    first, second, last = parameters_text(job, "DDIM").split("\n")
    assert (first, second) == ("a cat", "Negative prompt: dög")
    assert last.startswith("Steps: 4, Sampler: DDIM, CFG scale: 5, Seed: 7, Size: 64x72, ")
    assert 'Model: "my, model", Denoising strength: 0.5, Lora: "style: 0.8", Version' in last


def test_pixels_of_png_are_untouched() -> None:
    data, _ = encode_picture(PICTURE, "png", record_of(JOB), "x")
    assert Image.open(BytesIO(data)).tobytes() == PICTURE.tobytes()


@pytest.mark.parametrize("format", ["jpg", "webp"])
def test_plan_is_left_out_first_where_it_does_not_fit(tmp_path: Path, format: str) -> None:
    path, note = write(tmp_path, format, plan={"curve": "x" * 70_000})
    assert note is None
    assert read_record(str(path)).job == JOB


@pytest.mark.parametrize(("length", "replayable"), [(40_000, True), (70_000, False)])
def test_prompt_too_long_for_jpeg_is_said(tmp_path: Path, length: int, replayable: bool) -> None:
    job = replace(JOB, prompt="x" * length)
    path, note = write(tmp_path, "jpg", job)
    assert note is not None
    assert "use png" in note
    if replayable:
        assert read_record(str(path)).job == job
    else:
        with pytest.raises(PictureError, match="no sdx-accel settings"):
            read_record(str(path))
    assert read_record(str(write(tmp_path, "png", job)[0])).job == job


def test_lone_surrogate_in_the_prompt_does_not_lose_the_picture(tmp_path: Path) -> None:
    for format in FORMATS:
        job = replace(JOB, prompt="a\ud800b")
        assert read_record(str(write(tmp_path, format, job)[0])).job == job


def png_with(folder: Path, **texts: str) -> str:
    info = PngInfo()
    for key, text in texts.items():
        info.add_text(key, text)
    PICTURE.save(folder / "a.png", pnginfo=info)
    return str(folder / "a.png")


def test_other_tools_picture_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(PictureError, match="another tool's settings"):
        read_record(png_with(tmp_path, parameters="a cat\nSteps: 20"))
    with pytest.raises(PictureError, match="carries no sdx-accel settings; give a PROMPT"):
        read_record(png_with(tmp_path))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "5",
        '{"format": 1}',
        '{"format": "1", "settings": {}}',
        '{"format": 1, "settings": 5}',
    ],
)
def test_damaged_settings_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(PictureError, match="damaged"):
        read_record(png_with(tmp_path, sdx_accel=text))


def test_hostile_settings_are_refused(tmp_path: Path) -> None:
    for change in ({"steps": 10**9}, {"width": 8 * 10**6}, {"seed": "x"}, {"loras": "abc"}):
        settings = {**JOB.to_dict(), **change}
        text = json.dumps({"format": 1, "settings": settings})
        with pytest.raises(PictureError, match="damaged"):
            read_record(png_with(tmp_path, sdx_accel=text))


def test_newer_format_is_named(tmp_path: Path) -> None:
    with pytest.raises(PictureError, match="newer"):
        read_record(png_with(tmp_path, sdx_accel='{"format": 2, "settings": {}}'))


def test_what_is_no_picture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("x")
    for name, message in (("a.png", "not a picture"), ("b.png", "no such file"), ("", "cannot")):
        with pytest.raises(PictureError, match=message):
            read_record(str(tmp_path / name))
