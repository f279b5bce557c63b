"""`sdx-accel verify --aot`: kernels compiled for cards that are not here."""

import json
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton has no wheel for this platform")


def test_it_compiles_one_configuration_a_family(cli: Callable[..., Any]) -> None:
    result = cli("verify", "--aot", "--arch", "86", "--json")
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert report["clean"] is True
    facts = report["architectures"]["sm_86"]
    assert [fact["family"] for fact in facts] == ["forward", "backward", "wide", "short"]
    assert all(fact["tensor_core"] == "mma.sync" for fact in facts)


def test_what_is_not_clean_is_said_and_fails(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    spilled = {"family": "forward", "tensor_core": "mma.sync", "spill_bytes": 8, "clean": False}
    monkeypatch.setattr(
        "sdx_accel.runtime.ahead_of_time.compiled", lambda number, everything: [spilled]
    )
    result = cli("verify", "--aot", "--arch", "120")
    assert result.code == 1
    assert "sm_120: 0 of 1 clean (forward 1; mma.sync)" in result.out
    assert '"spill_bytes": 8' in result.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "sdx-accel verify --aot"),
        (("--aot", "--arch", "75"), "no kernels of ours: torch's kernels run there"),
        (("--aot", "--arch", "99"), "there are: 80, 86, 89, 90, 100, 120"),
    ],
)
def test_what_it_refuses(cli: Callable[..., Any], arguments: tuple[str, ...], words: str) -> None:
    result = cli("verify", *arguments)
    assert result.code == 2
    assert words in result.err
