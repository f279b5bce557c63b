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

from sdx_kernels._triton import aot, attention_special_aot
from sdx_kernels._triton.aot import (
    ARCHITECTURES,
    ATTENTION,
    DESCRIPTORS,
    ELEMENTWISE,
    FAMILIES,
    SOURCES,
    architectures,
    digest,
    first_of_kernels,
    launches,
    record,
    sample,
)

#: what the PTX of a product holds, by architecture
CORES: dict[int, set[str]] = {
    75: set(),
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


def hold(facts: list[dict[str, Any]], architecture: int) -> None:
    assert [fact for fact in facts if not fact["clean"]] == []
    cores = {fact["tensor_core"] for fact in facts if fact["family"] not in ELEMENTWISE}
    assert cores - {""} <= CORES[architecture]
    for fact in facts:
        # sums of flags and of weights are no products
        plain = fact["family"] in ELEMENTWISE or {"marks", "tops"} & set(
            fact["function"].split("_")
        )
        assert bool(fact["tensor_core"]) != bool(plain), fact
        described = fact["family"] in DESCRIPTORS and not plain
        assert (fact["descriptor_loads"] > 0) == described, fact


@pytest.mark.parametrize("architecture", [75, *ARCHITECTURES])
def test_each_kernel_is_first_once(architecture: int) -> None:
    found = [launch.source.fn.__name__ for launch in first_of_kernels(launches(architecture))]
    # the wide forward in one pass is Hopper's, and below it there are no descriptors
    assert len(found) == {75: 4, 90: 21, 100: 20, 120: 20}.get(architecture, 16)
    assert len(set(found)) == len(found)
    assert set(found) == {launch.source.fn.__name__ for launch in launches(architecture)}


def test_the_first_of_each_family() -> None:
    facts = compiled("--first", "86")
    assert [fact["family"] for fact in facts] == ["forward", "backward", "wide", "short"]


@pytest.mark.parametrize(
    "architecture",
    # half a minute each: two kinds of tensor core, the others in `make test-all`
    [
        pytest.param(a, marks=() if a in (86, 90) else pytest.mark.slow)
        for a in (75, *ARCHITECTURES)
    ],
)
def test_the_first_configuration_of_each_kernel_is_clean(architecture: int) -> None:
    facts = compiled("--kernels", str(architecture), f"{architecture}:group-norm")
    expected = [launch.source.fn.__name__ for launch in first_of_kernels(launches(architecture))]
    assert [fact["function"] for fact in facts] == expected
    hold(facts, architecture)
    if architecture == 90:
        # Hopper multiplies by warpgroup
        by = {fact["function"]: fact["tensor_core"] for fact in facts}
        for name in ("attention_fwd_kernel", "attention_tma_kernel", "keys_tma_kernel"):
            assert by[name] == "wgmma.mma_async"


#: of the cards whose first configurations are left to `make test-all`
SAMPLED = 5


@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a not in (86, 90)])
def test_a_drawn_slice_of_configurations_is_clean(architecture: int) -> None:
    facts = compiled("--sample", str(SAMPLED), str(architecture))
    expected = sample(architecture, launches(architecture, ATTENTION), SAMPLED)
    drawn = [(launch.family, launch.source.fn.__name__) for launch in expected]
    assert [(fact["family"], fact["function"]) for fact in facts] == drawn
    assert len(facts) == SAMPLED
    hold(facts, architecture)


def test_the_slices_of_the_cards_differ_and_never_change() -> None:
    def keys(architecture: int) -> list[Any]:
        drawn = sample(architecture, launches(architecture, ATTENTION), SAMPLED)
        return [(launch.family, dict(launch.key)) for launch in drawn]

    assert keys(86) == keys(86)
    assert keys(86) != keys(89)


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
@pytest.mark.parametrize(
    ("family", "architecture"), [(f, a) for f in FAMILIES for a in architectures(f)]
)
def test_every_configuration_of_dispatch_is_clean(architecture: int, family: str) -> None:
    facts = compiled(f"{architecture}:{family}")
    assert len(facts) > (8 if family == "attention-tma-bwd" else 15)
    hold(facts, architecture)


RECORD = Path(__file__).parents[2] / "docs" / "kernels" / "aot.json"


@pytest.mark.parametrize(
    ("family", "architecture"), [(f, a) for f in FAMILIES for a in architectures(f)]
)
def test_the_record_is_of_these_sources(family: str, architecture: int) -> None:
    # every configuration takes some ten minutes a card, so its result is kept; whoever changes a
    # kernel or a table compiles its family again:
    #   python -m sdx_kernels._triton.aot --record docs/kernels/aot.json 80:FAMILY 86:FAMILY …
    run = json.loads(RECORD.read_text()).get(family, {}).get(str(architecture))
    assert run is not None, f"{family} was never compiled for sm_{architecture}"
    changed = f"{family} has changed on sm_{architecture} since it was compiled"
    assert run["sources"] == digest(family, architecture), changed
    assert run["launches"] == sum(1 for _ in launches(architecture, (family,))) > 0
    assert run["not_clean"] == []


def test_the_record_has_nothing_else() -> None:
    recorded = {(f, int(a)) for f, runs in json.loads(RECORD.read_text()).items() for a in runs}
    assert recorded == {(f, a) for f in FAMILIES for a in architectures(f)}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_card_that_a_family_is_not_for_has_no_launches_of_it(family: str) -> None:
    for architecture in {75, *ARCHITECTURES} - set(architectures(family)):
        assert list(FAMILIES[family](architecture)) == [] or architecture == 75
        assert list(launches(architecture, (family,))) == []


def test_a_digest_knows_code_and_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest("short", 86)
    tile = ShortConfig(64, 64, 8, 1, "another", rest=16)
    monkeypatch.setattr(attention_special_aot, "ladder_for_short", lambda *_, **__: (tile,))
    assert digest("short", 86) != before
    monkeypatch.undo()
    assert digest("short", 86) == before
    monkeypatch.setitem(SOURCES, "short", ("attention_short.py", "attention_parts.py"))
    assert digest("short", 86) != before


def test_a_digest_knows_kernels_and_no_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = Path(aot.__file__).parent
    for file in kernels.glob("attention*.py"):
        (tmp_path / file.name).write_text(file.read_text())
    short = tmp_path / "attention_short.py"
    monkeypatch.setattr(aot, "__file__", str(tmp_path / "aot.py"))
    before = digest("short", 86)
    text = short.read_text()
    # the launcher, another file's function, the list of names
    for old, new in (
        ("query = reach(query, 1)", "query = reach(query, 1).clone()"),
        ("__all__ = [", '__all__ = [\n    "LN2",'),
    ):
        assert old in text
        short.write_text(text.replace(old, new))
        assert digest("short", 86) == before
    # a constant, a kernel's body, its decorator
    for old, new in (
        ("LN2 = 0.69", "LN2 = 0.70"),
        (
            "tl.dot(",
            "tl.dot (",
        ),
        ("@triton.jit\n", "@triton.jit(noinline=True)\n"),
    ):
        assert old in text
        short.write_text(text.replace(old, new))
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
