"""Where a measured order of attention shows: in `doctor`, and in `xattn_report()`."""

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sdx_accel.runtime import gathering
from sdx_accel.runtime.diagnosis import diagnose
from sdx_accel.runtime.facts import Facts, GpuFacts
from sdx_accel.runtime.findings import Level
from sdx_accel.runtime.reports import Report
from sdx_accel.runtime.warm import what_runs
from sdx_kernels import registry, target
from sdx_kernels.target import Target
from sdx_kernels.tuning import measured_order
from sdx_kernels.tuning.measured_file import Entry, document, file_name, identity

CARD = "NVIDIA GeForce RTX 3060"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of the test's own, in a process that has looked at none yet."""
    place = tmp_path / "cache"
    monkeypatch.setenv("SDX_CACHE", str(place))
    monkeypatch.delenv("SDX_TUNING", raising=False)
    monkeypatch.setattr(target, "triton_status", lambda: (True, None))
    next_process(monkeypatch)
    yield place
    # choices of these files must not live on
    registry._select.cache_clear()


def next_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_order, "_found", {})
    registry._select.cache_clear()


def leave(folder: Path, *entries: Entry) -> Path:
    whose = identity(CARD, (8, 6))
    folder.mkdir(exist_ok=True)
    path = folder / file_name(whose)
    path.write_text(json.dumps(document(whose, entries)))
    return path


ENTRY = Entry("self", "float16", (64, 64), (1, 9999), (1, 9999), "triton", 1.0, "sdpa", 2.0)


def order_row(**gpu: Any) -> Any:
    facts = Facts(cuda_usable=True, gpus=(GpuFacts(0, CARD, "nvidia", (8, 6), **gpu),))
    (row,) = (row for row in diagnose(facts).rows if row.subject == "order, GPU 0")
    return row


def test_doctor_names_the_order_in_use(folder: Path) -> None:
    path = leave(folder, ENTRY)
    found = gathering._tuned(CARD, (8, 6))
    digest = measured_order.measured(CARD, 8, 6).digest
    assert len(digest) == 12
    text = f"{path} (digest {digest}, 1 changes to the shipped order)"
    assert found == {"tuned": text}
    row = order_row(**found)
    assert (row.level, row.finding) == (Level.OK, f"measured here: {text}")


def test_doctor_names_a_file_that_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    path = leave(folder, ENTRY)
    path.write_text("{")
    row = order_row(**gathering._tuned(CARD, (8, 6)))
    assert (row.level, row.finding) == (Level.WARN, f"{path} is ignored: it is no JSON")
    assert row.mend is not None
    assert row.mend.startswith("sdx-accel bench --tune")
    next_process(monkeypatch)
    monkeypatch.setenv("SDX_TUNING", "off")
    assert "SDX_TUNING=off" in order_row(**gathering._tuned(CARD, (8, 6))).finding


def test_doctor_offers_to_measure_where_nobody_has() -> None:
    assert gathering._tuned(CARD, (8, 6)) == {}
    row = order_row()
    assert row.level is Level.OK
    assert row.finding.startswith("as shipped; `sdx-accel bench --tune`")


@pytest.mark.parametrize(
    "facts",
    [
        Facts(),
        Facts(cuda_usable=True, gpus=(GpuFacts(0, "Tesla T4", "nvidia", (7, 5)),)),
        Facts(cuda_usable=True, gpus=(GpuFacts(0, "Radeon", "amd"),)),
        Facts(cuda_usable=False, gpus=(GpuFacts(0, CARD, "nvidia", (8, 6)),)),
    ],
)
def test_doctor_says_nothing_of_an_order_where_there_is_none(facts: Facts) -> None:
    assert not [row for row in diagnose(facts).rows if row.subject.startswith("order")]


def test_what_doctor_says_of_a_card_is_what_was_measured_there(folder: Path) -> None:
    leave(folder, ENTRY)
    assert what_runs((8, 6), CARD).startswith("attention by our Triton kernel")
    assert what_runs((8, 6), "another").startswith("attention by torch's SDPA")


def test_the_report_names_the_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(folder, ENTRY)
    card = Target("cuda", (8, 6), 0, CARD)
    assert Report((), (), None).to_dict()["orders"] == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(target, "of", lambda device: card)
    report = Report((), (), None, fused={"vae": "whole"})
    digest = measured_order.measured(CARD, 8, 6).digest
    assert report.to_dict()["orders"] == [{"card": CARD, "digest": digest}]
    assert str(report).endswith(
        f"attention's order was measured on this {CARD} by bench --tune (digest {digest})"
    )
    assert str(replace(report, fused={})) == "sdx_accel is not enabled here"
