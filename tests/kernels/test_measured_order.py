"""The order measured on a card: what a file of it changes, and that no file can do more than that.

The file is data that another program may have written: everything but a whole, matching file is
ignored with one line.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sdx_kernels import registry, target
from sdx_kernels.checks import Signature
from sdx_kernels.ops.attention_impls import OPERATOR
from sdx_kernels.target import Target
from sdx_kernels.tuning import measured_order
from sdx_kernels.tuning.attention_order import preference
from sdx_kernels.tuning.measured_file import (
    MOST_BYTES,
    MOST_ENTRIES,
    MOST_LENGTH,
    NAMES,
    Entry,
    digest_of,
    document,
    file_name,
    identity,
)
from sdx_kernels.tuning.shipped_digest import shipped_digest
from sdx_kernels.tuning.table_digest import table_digest

CARD = Target("cuda", (8, 6), 101376, "NVIDIA GeForce RTX 3060", 28)
LONG = (2048, MOST_LENGTH)
SELF = Entry("sdxl-self-4096", "float16", (64, 64), LONG, LONG, "triton", 2.0, "sdpa", 3.0)
SHORT = Entry("cross", "float16", (64, 64), LONG, (33, 96), "triton-short", 0.1, "sdpa", 0.2)

Put = Callable[..., Path]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of the test's own, in a process that has looked at none yet."""
    monkeypatch.setenv("SDX_CACHE", str(tmp_path))
    monkeypatch.delenv("SDX_TUNING", raising=False)
    monkeypatch.setattr(target, "triton_status", lambda: (True, None))
    next_process(monkeypatch)
    yield tmp_path
    # choices of these files must not live on
    registry._select.cache_clear()


def next_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_order, "_found", {})
    registry._select.cache_clear()


@pytest.fixture
def put(folder: Path) -> Put:
    """Leaves a file as `bench --tune` does; values may be changed on the way."""

    def write(*entries: Entry, card: Target = CARD, **changed: Any) -> Path:
        assert card.capability is not None
        whose = identity(card.name, card.capability)
        path = folder / file_name(whose)
        path.write_text(json.dumps({**document(whose, entries), **changed}))
        return path

    return write


def signature(**changed: Any) -> Signature:
    plain = Signature(CARD, torch.float16, torch.float16, 2, 4096, 4096, 10, 10, 64, 64)
    return replace(plain, **changed)


def runs(**changed: Any) -> str:
    choice = OPERATOR.select(signature(**changed))
    assert choice is not None
    return choice.name


def test_an_entry_comes_first_for_its_card_shape_and_dtype_alone(put: Put) -> None:
    assert runs() == "sdpa"
    measured_order._found.clear()
    registry._select.cache_clear()
    put(SELF)
    assert runs() == "triton"
    assert runs(queries=2048, keys=100_000) == "triton"
    for other in (
        {"queries": 2047},
        {"keys": 2047},
        {"head_dim": 72},
        {"value_dim": 65},
        {"dtype": torch.bfloat16, "output_dtype": torch.bfloat16},
        {"target": replace(CARD, name="NVIDIA GeForce RTX 3090")},
        {"target": replace(CARD, capability=(8, 9))},
        {"target": Target("cpu", name=CARD.name)},
        {"target": Target("rocm", None, 0, CARD.name)},
        {"dropout": 0.1},
    ):
        shipped = replace(OPERATOR, prefer=preference).select(signature(**other))
        assert shipped is not None
        assert runs(**other) == shipped.name != "triton"


def test_masks_and_gradients_keep_the_shipped_order(put: Put) -> None:
    # takes masks and gradients as well, and comes first nowhere else
    put(replace(SELF, name="triton-wide"))
    assert runs() == "triton-wide"
    assert runs(bias="bool", bias_dtype=torch.bool) == "triton"
    assert runs(structure="LowerTriangularMask", band="causal") == "triton"
    assert runs(grad=True) == "triton"


def test_the_shipped_order_follows(put: Put) -> None:
    card = replace(CARD, capability=(9, 0))
    put(replace(SELF, head_dims=(512, 512)), card=card)
    wide = signature(head_dim=512, value_dim=512, target=card)
    assert measured_order.order(wide)[0] == ("triton", "triton-wide")
    choice = OPERATOR.select(wide)
    assert choice is not None
    assert choice.name == "triton-wide"
    assert choice.reasons["sdpa"] == ("triton-wide has priority",)


def test_the_reason_has_both_times(put: Put) -> None:
    put(SELF)
    choice = OPERATOR.select(signature())
    assert choice is not None
    (reason,) = choice.reasons["sdpa"]
    assert reason == (
        "timed on this card by bench --tune: sdxl-self-4096, float16, triton 2 ms against sdpa's 3"
    )


def test_the_first_entry_that_holds_counts(put: Put) -> None:
    put(replace(SELF, name="sdpa"), SELF)
    assert runs() == "sdpa"


def test_what_cannot_run_leaves_the_shipped_order(put: Put) -> None:
    """Descriptors start at 9.0: an entry that names them on 8.6 changes nothing."""
    put(replace(SELF, name="triton-tma"))
    choice = OPERATOR.select(signature())
    assert choice is not None
    assert choice.name == "sdpa"
    assert any("too old" in reason for reason in choice.reasons["triton-tma"])
    assert choice.reasons["triton"] == ("sdpa has priority",)


def test_a_kernel_that_runs_only_where_it_is_preferred_can_be_preferred(put: Put) -> None:
    put(SHORT)
    assert runs(keys=77) == "triton-short"
    assert runs(keys=97) == "sdpa"


def test_it_is_read_once_a_process(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(SELF)
    assert runs() == "triton"
    put()
    assert runs(queries=5000) == "triton"
    path.unlink()
    assert runs(queries=5001) == "triton"
    next_process(monkeypatch)
    assert runs() == runs(queries=5000) == "sdpa"
    # and a file that comes later waits for the next process
    put(SELF)
    assert runs(queries=5002) == "sdpa"


@pytest.mark.parametrize("value", ["off", "OFF", "0"])
def test_the_off_switch(
    put: Put, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, value: str
) -> None:
    put(SELF)
    monkeypatch.setenv("SDX_TUNING", value)
    with caplog.at_level(logging.INFO, logger="sdx_kernels"):
        assert runs() == "sdpa"
    assert [record.levelname for record in caplog.records] == ["INFO"]
    next_process(monkeypatch)
    monkeypatch.setenv("SDX_TUNING", "on")
    assert runs() == "triton"


def bad(**changed: Any) -> dict[str, Any]:
    whose = identity(CARD.name, (8, 6))
    values = document(whose, [SELF])
    values["entries"][0].update(changed)
    return values


WHOSE = {"card": "other", "capability": [8, 9], "torch": "2.0.0", "triton": "3.0", "tables": "0"}
HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "no JSON": b"{",
    "half a file": json.dumps(bad()).encode()[:-20],
    "no text": b"\xff\xfe\x00",
    "another encoding": json.dumps(bad()).encode("utf-16"),
    "a list": b"[]",
    "a number": b"1",
    "nested": b"[" * 30_000 + b"]" * 30_000,
    "a number of many digits": b'{"format": ' + b"9" * 20_000 + b"}",
    "large": json.dumps(bad()).encode() + b" " * MOST_BYTES,
    "another format": json.dumps({**bad(), "format": 2}).encode(),
    "more fields": json.dumps({**bad(), "more": 1}).encode(),
    "fewer fields": json.dumps({"format": 1, "entries": []}).encode(),
    **{f"other {k}": json.dumps({**bad(), k: v}).encode() for k, v in WHOSE.items()},
    "entries are no list": json.dumps({**bad(), "entries": {"0": bad()["entries"][0]}}).encode(),
    "too many": json.dumps({**bad(), "entries": bad()["entries"] * (MOST_ENTRIES + 1)}).encode(),
    "an entry is no object": json.dumps({**bad(), "entries": ["triton"]}).encode(),
    "an entry with more": json.dumps(bad(more=1)).encode(),
    "one good, one bad": json.dumps({**bad(), "entries": [*bad()["entries"], 1]}).encode(),
    **{
        f"{field} {value}": json.dumps(bad(**{field: value})).encode()
        for field, value in (
            ("name", "os.system"),
            ("name", "reference"),
            ("name", "sdpa-math"),
            ("name", ["triton"]),
            ("instead", 3),
            ("ms", float("nan")),
            ("ms", float("inf")),
            ("ms", -1.0),
            ("ms", 0.0),
            ("ms", True),
            ("instead_ms", "1.0"),
            ("dtype", "float32"),
            ("dtype", ["float16"]),
            ("shape", "a\nb"),
            ("shape", "a" * 41),
            ("shape", None),
            ("head_dims", [64]),
            ("head_dims", [0, 64]),
            ("head_dims", [64.0, 64.0]),
            ("head_dims", [True, 64]),
            ("queries", [4096, 1]),
            ("queries", "12"),
            ("keys", [1, MOST_LENGTH + 1]),
            ("keys", [1, 10**400]),
        )
    },
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_file_that_breaks_a_rule_is_ignored_in_one_line(
    put: Put, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    path = put(SELF)
    path.write_bytes(HOSTILE[what])
    with caplog.at_level(logging.DEBUG, logger="sdx_kernels"):
        assert runs() == "sdpa"
        assert runs(queries=5000) == "sdpa"
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(f"{path} is ignored: it")
    assert "\n" not in record.getMessage()
    # nothing of a file is repeated where people read
    assert len(record.getMessage()) - len(str(path)) < 80
    assert "os.system" not in record.getMessage()
    assert ("larger" in record.getMessage()) == (what == "large")


def test_the_file_that_the_broken_ones_are_made_of_is_whole(put: Put) -> None:
    put(SELF).write_text(json.dumps(bad()))
    assert runs() == "triton"


def folder_in_its_place(path: Path) -> None:
    path.mkdir()


def pipe_in_its_place(path: Path) -> None:
    os.mkfifo(path)


def link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")
@pytest.mark.parametrize("make", [folder_in_its_place, pipe_in_its_place, link_to_a_device])
def test_what_is_no_file_is_not_read(
    put: Put, caplog: pytest.LogCaptureFixture, make: Callable[[Path], None]
) -> None:
    path = put(SELF)
    path.unlink()
    make(path)
    with caplog.at_level(logging.INFO, logger="sdx_kernels"):
        assert runs() == "sdpa"
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_file_that_cannot_be_read_is_ignored(
    put: Put, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(SELF)

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(measured_order, "read", refuse)
    assert runs() == "sdpa"
    assert "it cannot be read (Permission denied)" in caplog.text


def test_an_older_versions_file_is_told_of_and_ignored(
    put: Put, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = put(SELF)
    path.rename(folder / path.name.replace(path.stem[-12:], "0" * 12))
    with caplog.at_level(logging.INFO, logger="sdx_kernels"):
        assert runs() == "sdpa"
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert "measured with another torch, triton or sdx_accel" in record.getMessage()


def test_each_part_of_the_identity_names_another_file() -> None:
    whose = identity(CARD.name, (8, 6))
    assert set(WHOSE) == set(whose)
    names = {file_name({**whose, key: value}) for key, value in WHOSE.items()}
    assert len(names | {file_name(whose)}) == 6
    assert file_name(whose).startswith("attention-nvidia-geforce-rtx-3060-sm86-")
    # a driver's name is no path
    assert "/" not in file_name({**whose, "card": "../../etc/x" * 20})


@pytest.mark.parametrize("where", [None, "missing"])
def test_without_a_folder_nothing_happens(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: str | None,
) -> None:
    place = None if where is None else folder / where
    monkeypatch.setattr(measured_order, "cache_folder", lambda: place)
    with caplog.at_level(logging.DEBUG, logger="sdx_kernels"):
        assert runs() == "sdpa"
    assert table_digest() == shipped_digest()
    assert caplog.records == []


def test_on_a_cpu_no_file_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_order, "measured", None)
    assert runs(target=Target("cpu", name="cpu")) == "sdpa"


def test_the_names_are_the_registrys() -> None:
    assert set(NAMES) <= set(OPERATOR.names())
    assert "reference" not in NAMES


def pretend_cards(monkeypatch: pytest.MonkeyPatch, *cards: Target) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
    monkeypatch.setattr(target, "of", lambda device: cards[device.index])


def test_the_digest_of_the_tables_has_the_measured_order(
    put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = table_digest()
    assert shipped == shipped_digest()
    assert len(shipped) == 12
    path = put(SELF)
    # no card of this machine: a plan that is made here stays as it is
    assert table_digest() == shipped
    pretend_cards(monkeypatch, replace(CARD, name="another"), CARD)
    first = table_digest()
    assert measured_order.in_use() == ((CARD.name, digest_of(path.read_bytes())),)
    assert len(first) == 12
    assert first != shipped
    # as read, whatever becomes of the file
    path.unlink()
    assert table_digest() == first
    put(replace(SELF, ms=1.9))
    assert table_digest() == first
    next_process(monkeypatch)
    assert table_digest() not in (first, shipped)


@pytest.mark.parametrize("how", ["off", "no entry", "broken", "another card"])
def test_an_order_that_changes_nothing_has_the_shipped_digest(
    put: Put, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    path = put(*([] if how == "no entry" else [SELF]))
    if how == "off":
        monkeypatch.setenv("SDX_TUNING", "off")
    if how == "broken":
        path.write_text("{")
    pretend_cards(monkeypatch, replace(CARD, capability=(8, 9)) if how == "another card" else CARD)
    assert table_digest() == shipped_digest()


def test_without_a_file_no_device_is_asked_for_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", None)
    assert table_digest() == shipped_digest()


def test_a_forked_process_has_the_shipped_digest(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: torch.device) -> Target:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    put(SELF)
    pretend_cards(monkeypatch, CARD)
    monkeypatch.setattr(target, "of", refuse)
    assert table_digest() == shipped_digest()


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_a_compiled_first_call_chooses_the_same(put: Put, dynamic: bool | None) -> None:
    """The file is read while Dynamo traces; its entries are constants of the graph."""
    put(SELF)

    def doubled_by_ours(x: torch.Tensor) -> torch.Tensor:
        choice = OPERATOR.select(signature(queries=x.shape[0], keys=x.shape[0]))
        return x * (2 if choice is not None and choice.name == "triton" else 1)

    torch._dynamo.reset()
    compiled = torch.compile(doubled_by_ours, backend="eager", fullgraph=True, dynamic=dynamic)
    for length, factor in ((4096, 2.0), (1024, 1.0), (5000, 2.0)):
        assert compiled(torch.ones(length))[0].item() == factor
