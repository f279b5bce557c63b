"""Bad input: one message that says what to do, the right exit code, and nothing is started."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sdx_accel.errors import WorkError

Cli = Callable[..., Any]


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every refusal here comes before any model is loaded."""

    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("sdx_accel.runtime.checkpoints.load", load)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("x --width 65", "--width 64 or 72"),
        ("x --height 1000000", "--height 16384"),
        ("x --width 0", "--width 8"),
        ("x --vram 0.1", "the smallest budget that works is"),
        ("x --vram lots", "--vram 'lots' is not a budget"),
        ("x --steps 0", "--steps 0"),
        ("x --num 0", "--num 0"),
        ("x --seed -1", "--seed -1"),
        ("x --guidance -1", "--guidance -1"),
        ("x --scheduler eulr", "euler"),
        ("x --device cuda:99", "--device cuda:99"),
        ("x --device tpu", "built: auto, cpu, cuda"),
        ("x --lora absent.safetensors", "no such file"),
        ("x --lora absent.safetensors:0.5", "absent.safetensors: no such file"),
        ("x --image absent.png", "absent.png: no such file"),
        ("x --image text.png", "is not a picture"),
        ("x --mask a.png", "give --image"),
        ("x --strength 0.5", "give --image"),
        ("x --ram lots", "--ram 'lots' is not an amount of memory"),
        ("x --quality fast", "built: exact, near"),
        ("x --output absent/sub", "does not exist"),
        ("x --output text.png/sub", "--output"),
        ("x --output a.gif", ".png, .jpg or .webp"),
        ("x --output a.png --format jpg", "differ"),
        ("x --from absent.png", "no such file"),
        ("--from text.png", "not a picture"),
        ("", "no prompt"),
        ("x --model random:nope", "random:"),
        ("x --model absent/folder/here", "absent"),
        ("x --model empty", "model_index.json"),
        ("x --model broken.safetensors", "broken.safetensors"),
    ],
)
def test_refused_before_any_work(cli: Cli, tmp_path: Path, arguments: str, message: str) -> None:
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    before = sorted(tmp_path.rglob("*"))
    result = cli("generate", *arguments.split())
    assert result.code == 2, result.err
    assert message in result.err
    assert "Traceback" not in result.err
    lines = [line for line in result.err.splitlines() if not line.startswith("note: ")]
    assert len(lines) == 1
    assert lines[0].startswith("sdx-accel: ")
    assert [path for path in sorted(tmp_path.rglob("*")) if path.name != "outputs"] == before


def test_unknown_flag_and_verb_are_usage_errors(cli: Cli) -> None:
    for arguments in (["generate", "x", "--cpu-offload"], ["paint"], ["generate", "--steps", "x"]):
        result = cli(*arguments)
        assert result.code == 2
        assert "Traceback" not in result.err


def test_no_gpu_is_explained(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = cli("generate", "x", "--device", "cuda")
    assert result.code == 2
    assert "sdx-accel doctor" in result.err


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (WorkError("the card went away"), 1, "sdx-accel: the card went away"),
        (ZeroDivisionError("division by zero"), 1, "ZeroDivisionError: division by zero"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_failures_during_work(
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    raised: BaseException,
    code: int,
    message: str,
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise raised

    monkeypatch.setattr("sdx_accel.runtime.checkpoints.load", load)
    result = cli("generate", "x")
    assert result.code == code
    assert message in result.err
    assert "Traceback" not in result.err
    monkeypatch.setenv("SDX_DEBUG", "1")
    if code == 1:
        assert "Traceback" in cli("generate", "x").err


def test_plan_refuses_like_generate(cli: Cli) -> None:
    assert cli("plan", "--width", 65).code == 2
    assert cli("plan", "--ram", "lots").code == 2
    assert cli("plan", "--model", "random:nope").code == 2
    assert cli("plan", "--quality", "fast").code == 2
