"""Single flags, sizes and the job's own checks: no torch, no files but those made here."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sdx_accel.cli.adapter_flags import ControlNet, Embedding, IpAdapter, Lora, parse_lora
from sdx_accel.cli.flags import parse_device, parse_ram, parse_vram, refuse_unbuilt
from sdx_accel.cli.job import Job
from sdx_accel.cli.sizes import check_size, nearest_sizes
from sdx_accel.errors import RefusedError, SizeError

JOB = Job("a cat", "random:sdxl-tiny", 64, 72, 4, 5.0, 7)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("style.safetensors", Lora("style.safetensors", 1.0)),
        ("style.safetensors:0.8", Lora("style.safetensors", 0.8)),
        ("style.safetensors:-0.5", Lora("style.safetensors", -0.5)),
        ("C:\\loras\\style.safetensors", Lora("C:\\loras\\style.safetensors", 1.0)),
        ("C:\\loras\\style.safetensors:0.8", Lora("C:\\loras\\style.safetensors", 0.8)),
        ("D:/loras/style.safetensors", Lora("D:/loras/style.safetensors", 1.0)),
        ("a:b/style.safetensors:2", Lora("a:b/style.safetensors", 2.0)),
        ("модель 🙂.safetensors:1e-1", Lora("модель 🙂.safetensors", 0.1)),
    ],
)
def test_lora_scale_is_told_from_colons_in_paths(text: str, expected: Lora) -> None:
    assert parse_lora(text) == expected


def test_lora_file_whose_name_ends_in_a_number_is_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("style:2").touch()
    assert parse_lora("style:2") == Lora("style:2", 1.0)
    assert parse_lora("style:2:0.5") == Lora("style:2", 0.5)


@pytest.mark.parametrize("text", ["", ":0.5", "  ", "a:nan", "a:inf"])
def test_lora_without_path_or_finite_scale_is_refused(text: str) -> None:
    with pytest.raises(RefusedError, match="--lora"):
        parse_lora(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8", "8"),
        ("6.8", "6.8"),
        ("8GiB", "8gib"),
        (" 8 gb", "8 gb"),
        ("AUTO", "auto"),
        ("80%", "80%"),
        ("-1", "-1"),
        ("-0.5", "-0.5"),
        (".5", ".5"),
    ],
)
def test_vram_spellings(text: str, expected: str) -> None:
    assert parse_vram(text) == expected


@pytest.mark.parametrize(
    "text", ["", "lots", "0", "0%", "120%", "-5%", "nan", "inf", "8 TB", "8,5"]
)
def test_vram_nonsense_is_refused(text: str) -> None:
    with pytest.raises(RefusedError, match="--vram"):
        parse_vram(text)


@pytest.mark.parametrize("text", ["gpu", "cuda:", "cuda:x", "mps", ""])
def test_device_that_is_not_built_is_refused(text: str) -> None:
    with pytest.raises(RefusedError, match="built: auto, cpu, cuda"):
        parse_device(text)


def test_what_is_not_built_names_what_is() -> None:
    with pytest.raises(RefusedError, match="not built yet; built: exact, near"):
        refuse_unbuilt({"quality": "fast"})


def test_an_amount_of_memory_is_spelled_as_a_budget() -> None:
    assert parse_ram(" 16GiB ") == "16gib"
    with pytest.raises(RefusedError, match="--ram"):
        parse_ram("lots")


@pytest.mark.parametrize("size", [(64, 64), (72, 64), (8, 8), (16, 8), (520, 64), (680, 384)])
def test_case_121_any_multiple_of_8_is_valid(size: tuple[int, int]) -> None:
    check_size(*size)


@pytest.mark.parametrize(
    ("pixels", "multiple", "expected"),
    [
        (65, 8, (64, 72)),
        (7, 8, (8,)),
        (0, 8, (8,)),
        (-3, 8, (8,)),
        (20000, 8, (16384,)),
        (680, 64, (640, 704)),
        (64, 8, (64,)),
    ],
)
def test_nearest_sizes(pixels: int, multiple: int, expected: tuple[int, ...]) -> None:
    assert nearest_sizes(pixels, multiple) == expected


def test_case_096_coarser_multiples_name_their_own_nearest_sizes() -> None:
    with pytest.raises(SizeError, match=r"--width 640 or 704$"):
        check_size(680, 384, multiple=64)


def test_wrong_sizes_name_both_sides() -> None:
    with pytest.raises(SizeError, match="--width 1016 or 1024 and --height 768 or 776"):
        check_size(1023, 770)


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 0},
        {"steps": 1001},
        {"num": 0},
        {"seed": -1},
        {"seed": 2**63},
        {"seed": 2**63 - 1, "num": 2},
        {"guidance": math.nan},
        {"guidance": -1.0},
        {"guidance": math.inf},
        {"dtype": "fp8"},
        {"device": "tpu"},
        {"vram": "0"},
        {"quality": "fast"},
        {"width": 0},
        {"mask": "/m.png"},
        {"strength": 0.5},
        {"image": "/i.png", "strength": 0.0},
        {"image": "/i.png", "strength": 1.5},
        {"image": "/i.png", "strength": math.nan},
        {"image": "/i.png", "strength": 0.2},
    ],
)
def test_settings_out_of_range_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(RefusedError, match=r"use|one of|built|give|leaves"):
        replace(JOB, **change)


def test_too_few_steps_for_the_strength_names_enough() -> None:
    with pytest.raises(RefusedError, match="--steps 5 or more"):
        replace(JOB, image="/i.png", strength=0.2)
    assert replace(JOB, image="/i.png", strength=0.2, steps=5).kind == "image"


def test_job_round_trips_through_json() -> None:
    job = replace(
        JOB,
        prompt="日本 🙂",
        loras=(Lora("a.safetensors", 0.5),),
        controlnets=(ControlNet("random:controlnet", 0.5, "/c.png"), ControlNet("owner/net")),
        ip_adapters=(IpAdapter("a.safetensors", 0.6, "/p.png"),),
        embeddings=(Embedding("e.safetensors", "<e>"),),
        image="/i.png",
        mask="/m.png",
        strength=0.5,
        vram="80%",
    )
    assert Job.from_dict(json.loads(json.dumps(job.to_dict()))) == job
    assert job.kind == "inpaint"


def test_job_from_a_newer_version_ignores_what_it_does_not_know() -> None:
    assert Job.from_dict({**JOB.to_dict(), "sharpness": 3}) == JOB


@pytest.mark.parametrize(
    "change",
    [
        {"steps": "20"},
        {"steps": True},
        {"prompt": None},
        {"loras": [{"path": "x"}]},
        {"loras": [5]},
        {"loras": [{"path": "x", "scale": "1"}]},
        {"controlnets": [{"path": "x", "scale": 1, "image": 3}]},
        {"width": 64.5},
    ],
)
def test_job_with_values_of_the_wrong_type_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(RefusedError):
        Job.from_dict({**JOB.to_dict(), **change})


def test_single_is_the_job_of_one_picture() -> None:
    assert replace(JOB, num=3).single(2) == replace(JOB, seed=9, num=1)
