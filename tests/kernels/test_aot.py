"""The kernels compiled for GPUs that are not here: tensor cores, no spills, shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sdx_kernels.tuning.attention_short import ShortConfig

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from sdx_kernels._triton import attention_special_aot
from sdx_kernels._triton.aot import (
    ARCHITECTURES,
    DESCRIPTORS,
    FAMILIES,
    SOURCES,
    digest,
    launches,
    record,
)

#: what the PTX of a product holds, by architecture
CORES = {
    80: {"mma.sync"},
    86: {"mma.sync"},
    89: {"mma.sync"},
    90: {"mma.sync", "wgmma.mma_async"},
    100: {"mma.sync", "tcgen05.mma"},
    120: {"mma.sync"},
}


def compiled(*arguments: str) -> list[dict[str, Any]]:
    """Lines of JSON from a process that does not interpret, where Triton can compile."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "sdx_kernels._triton.aot", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    "architecture",
    # 8 to 23 s each: two kinds of tensor core, the others in `make test-all`
    [pytest.param(a, marks=() if a in (86, 90) else pytest.mark.slow) for a in ARCHITECTURES],
)
def test_the_first_configuration_of_each_family_is_clean(architecture: int) -> None:
    facts = compiled("--first", str(architecture))
    expected = [name for name in FAMILIES if name not in DESCRIPTORS or architecture >= 90]
    assert [fact["family"] for fact in facts] == expected
    assert [fact for fact in facts if not fact["clean"]] == []
    assert {fact["tensor_core"] for fact in facts} <= CORES[architecture]
    for fact in facts:
        assert (fact["descriptor_loads"] > 0) == (fact["family"] in DESCRIPTORS)


def test_hopper_multiplies_by_warpgroup() -> None:
    facts = compiled("--first", "90:forward", "90:tma", "90:attention-tma-bwd")
    assert [fact["tensor_core"] for fact in facts] == ["wgmma.mma_async"] * 3


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_head_dim_class_and_dtype_has_a_native_configuration(architecture: int) -> None:
    found = {
        (launch.key["head_dim"], launch.key["dtype"])
        for launch in launches(architecture, ("forward", "wide"))
    }
    for head_dim in (40, 64, 80, 128, 160, 256, 512):
        for dtype in ("float16", "bfloat16"):
            assert (head_dim, dtype) in found
    for head_dim in (40, 64, 80, 128, 512):
        assert (head_dim, "float32") in found
    backward = {launch.key["head_dim"] for launch in launches(architecture, ("backward",))}
    assert backward == {40, 64, 80, 128, 160, 256}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_configuration_of_dispatch_is_clean(architecture: int, family: str) -> None:
    facts = compiled(f"{architecture}:{family}")
    least = 8 if family == "attention-tma-bwd" else 15
    assert len(facts) > least or (family in DESCRIPTORS and architecture < 90)
    assert [fact for fact in facts if not fact["clean"]] == []


RECORD = Path(__file__).parents[2] / "docs" / "kernels" / "aot.json"


def test_the_record_is_of_these_sources() -> None:
    # every configuration takes some ten minutes a card, so its result is kept; whoever changes a
    # kernel or a table compiles its family again:
    #   python -m sdx_kernels._triton.aot --record docs/kernels/aot.json 80:FAMILY 86:FAMILY …
    for family, runs in json.loads(RECORD.read_text()).items():
        for architecture, run in runs.items():
            changed = f"{family} has changed on sm_{architecture} since it was compiled"
            assert run["sources"] == digest(family, int(architecture)), changed
            assert run["launches"] == sum(1 for _ in launches(int(architecture), (family,)))
            assert run["not_clean"] == []


def test_a_digest_knows_code_and_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest("short", 86)
    tile = ShortConfig(64, 64, 8, 1, "another", rest=16)
    monkeypatch.setattr(attention_special_aot, "ladder_for_short", lambda *_, **__: (tile,))
    assert digest("short", 86) != before
    monkeypatch.undo()
    assert digest("short", 86) == before
    monkeypatch.setitem(SOURCES, "short", ("attention_short.py", "attention_parts.py"))
    assert digest("short", 86) != before


def test_a_record_replaces_what_other_sources_gave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "aot.json"
    clean = {"family": "short", "architecture": 86, "clean": True}
    record(file, [clean, {**clean, "clean": False}])
    record(file, [{**clean, "architecture": 90}])
    runs = json.loads(file.read_text())["short"]
    assert {name: len(run["not_clean"]) for name, run in runs.items()} == {"86": 1, "90": 0}
    record(file, [clean])
    runs = json.loads(file.read_text())["short"]
    assert {name: len(run["not_clean"]) for name, run in runs.items()} == {"86": 0, "90": 0}
