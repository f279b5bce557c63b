"""A card's calibration: measured once, read afterwards, never in the way."""

import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import asdict, replace
from random import Random
from types import SimpleNamespace

import pytest
import torch

from sdx_accel.budget.machine import Machine
from sdx_accel.budget.units import GIB, MIB
from sdx_accel.runtime import calibration
from sdx_accel.runtime.calibration import (
    COPY_BYTES,
    SPAN_SECONDS,
    WINDOW_SECONDS,
    Record,
    key_of,
    load,
    record_for,
    steady_seconds,
)
from sdx_accel.runtime.card_speed import CudaMeasure
from sdx_accel.runtime.probe import warm_up
from sdx_accel.runtime.user_cache import cache_folder, read_values, write_values


class FakeCard:
    """What `calibrate` asks of a card."""

    def __init__(self, driver="580.95", context=600 * MIB):
        self.key = key_of("GPU-1", driver, "2.13.0", "91900")
        self._context = context

    def non_torch_bytes(self):
        return self._context


RATES = {(True, False): 12e9, (True, True): 10e9, (False, False): 3e9}


class Script:
    """Readings of a card with a 12 GB/s link, 10 GB/s of them under load, and 40 TFLOP/s."""

    def __init__(self, flops=40e12, block=20e12):
        self.flops, self.block = flops, block
        self.copied, self.worked = [], []

    def copy(self, n_bytes, *, pinned, busy):
        self.copied.append(n_bytes)
        # the first of each kind is slower: the best counts
        slow = 2.0 if len(self.copied) in (1, 6, 11) else 1.0
        return slow * n_bytes / RATES[pinned, busy]

    def work(self, kind):
        self.worked.append(kind)
        return 1e12, 1e12 / (self.block if kind == "block" else self.flops)


def test_a_record_is_measured_once_and_read_afterwards(tmp_path):
    script = Script()
    first = record_for(FakeCard(), script, tmp_path)
    assert first.context_bytes == 600 * MIB
    assert first.pinned_bytes_per_s == 12e9
    assert first.loaded_bytes_per_s == 10e9
    assert first.pageable_bytes_per_s == 3e9
    # 416 MiB and four kinds of work: what keeps it under five seconds
    assert sum(script.copied) == 13 * COPY_BYTES
    assert script.worked == ["matmul", "convolution", "attention", "block"]
    again = Script()
    assert record_for(FakeCard(), again, tmp_path) == first
    assert not again.copied
    assert not again.worked
    assert load(FakeCard().key, tmp_path) == first


def test_the_slower_of_arithmetic_and_host_counts(tmp_path):
    assert record_for(FakeCard(), Script(block=20e12), tmp_path / "a").flops_per_s == 20e12
    assert record_for(FakeCard(), Script(block=90e12), tmp_path / "b").flops_per_s == 40e12


def test_kinds_of_work_count_by_the_time_they_take(tmp_path):
    class Uneven(Script):
        def work(self, kind):
            return 1e12, {"matmul": 0.02, "convolution": 0.1, "attention": 0.05, "block": 1e-6}[
                kind
            ]

    record = record_for(FakeCard(), Uneven(), tmp_path)
    expected = 1e12 / (0.644 * 0.02 + 0.240 * 0.1 + 0.116 * 0.05)
    assert record.flops_per_s == pytest.approx(expected, rel=0.05)
    # two digits, so that two runs of one card give one plan
    assert record.flops_per_s == float(f"{record.flops_per_s:.1e}")


class Clock:
    """A card on a shared host: `call` seconds a call, and whatever `disturb` adds to a window.

    `disturb` gets the time since the beginning and the length of the window, both in seconds.
    """

    def __init__(self, call, disturb=lambda now, length: 0.0):
        self.call, self.disturb = call, disturb
        self.now, self.windows = 0.0, []

    def __call__(self, calls):
        length = calls * self.call
        length += self.disturb(self.now, length)
        self.now += length
        self.windows.append(calls)
        return length


def test_a_shared_host_changes_no_figure():
    # three of four windows lose 1 to 8 ms to another program, which is up to twice their length
    random = Random(5)

    def other(now, length):
        return random.uniform(1e-3, 8e-3) if random.random() < 0.75 else 0.0

    for _ in range(50):
        clock = Clock(3e-4, other)
        assert steady_seconds(clock) == pytest.approx(3e-4)
        # one that the other program has lengthened does not keep windows short
        assert clock.windows[-1] * 3e-4 >= WINDOW_SECONDS


def test_a_bad_fifth_of_a_second_is_not_the_cards_speed():
    clock = Clock(3e-4, lambda now, length: length * 0.6 if now < 0.2 else 0.0)
    assert steady_seconds(clock) == pytest.approx(3e-4)


def test_a_card_that_has_to_rise_to_its_clock_rate_is_measured_above_it():
    clock = Clock(5e-5, lambda now, length: length * max(0.0, 1 - now / 0.05))
    assert steady_seconds(clock) == pytest.approx(5e-5)


@pytest.mark.parametrize("call", [1e-6, 5e-5, 3e-4, 0.02, 0.25])
def test_windows_are_as_long_as_they_have_to_be_and_all_take_little(call):
    clock = Clock(call)
    assert steady_seconds(clock) == pytest.approx(call)
    *_, calls = clock.windows
    assert calls == 1 or calls * call < 2 * WINDOW_SECONDS
    assert calls * call >= min(WINDOW_SECONDS, 1024 * call)
    assert clock.now < SPAN_SECONDS + 2 * max(call, WINDOW_SECONDS)


def test_a_very_slow_card_is_timed_once():
    # half precision on a card of 2016: 0.95 s for a block, after the call that loads the library
    clock = Clock(0.95)
    assert steady_seconds(clock) == 0.95
    assert clock.windows == [1]


def test_a_clock_that_stands_still_ends():
    assert steady_seconds(lambda calls: 0.0) == 0.0


def test_work_is_timed_by_the_cards_own_clock(monkeypatch):
    # the host's clock, which a busy host stretches, is not looked at
    made = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing
            made.append(self)

        def record(self):
            self.at = clock.now

        def synchronize(self):
            clock.waited += 1

        def elapsed_time(self, end):
            return (end.at - self.at) * 1e3

    clock = SimpleNamespace(now=0.0, waited=0, calls=0)

    def tiny():
        clock.calls += 1
        clock.now += 1e-3

    for name, stand_in in {
        "Event": Event,
        "device": lambda _: nullcontext(),
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: nullcontext())
    monkeypatch.setattr("time.perf_counter", lambda: pytest.fail("the host's clock"))
    measure = CudaMeasure(torch.device("cuda", 0))
    monkeypatch.setattr(measure, "_tiny", lambda: (5.0, tiny), raising=False)
    done, seconds = measure.work("tiny")
    assert (done, seconds) == (5.0, pytest.approx(1e-3))
    assert clock.waited == len(made) / 2
    # the first call, which loads the library, is in no window
    assert clock.calls > 200


def test_another_driver_measures_again(tmp_path):
    record_for(FakeCard("580.95"), Script(), tmp_path)
    script = Script()
    other = record_for(FakeCard("590.10"), script, tmp_path)
    assert script.copied
    assert other.key != FakeCard("580.95").key
    assert load(FakeCard("580.95").key, tmp_path) is not None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"key": 1}',
        "\udcff",
        "version",
        "rate",
        "key",
    ],
)
def test_a_broken_file_is_measured_again(tmp_path, text):
    card = FakeCard()
    record = record_for(card, Script(), tmp_path)
    (file,) = tmp_path.iterdir()
    changed = {"version": {"version": 99}, "rate": {"flops_per_s": None}, "key": {"key": "x"}}
    if text in changed:
        file.write_text(json.dumps({**asdict(record), **changed[text]}))
    else:
        file.write_bytes(text.encode("utf-8", "surrogateescape"))
    script = Script()
    assert load(card.key, tmp_path) is None
    assert record_for(card, script, tmp_path) == record
    assert script.copied
    assert load(card.key, tmp_path) == record


def test_a_read_only_home_still_plans(tmp_path, caplog):
    # a file where the folder should be: the same refusal for every user, root included
    (tmp_path / "home").write_text("")
    with caplog.at_level("INFO", logger="sdx_accel"):
        record = record_for(FakeCard(), Script(), tmp_path / "home" / "sdx_accel")
    assert record is not None
    assert len([r for r in caplog.records if "cannot be kept" in r.message]) == 1


def test_no_home_at_all_still_plans(monkeypatch):
    for name in ("SDX_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert cache_folder() is None
    assert record_for(FakeCard(), Script()) is not None


def test_the_cache_folder_can_be_named(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    monkeypatch.delenv("SDX_CACHE", raising=False)
    assert cache_folder() == tmp_path / "x" / "sdx_accel"
    monkeypatch.setenv("SDX_CACHE", str(tmp_path / "named"))
    assert cache_folder() == tmp_path / "named"


def test_a_card_that_cannot_be_measured_has_generic_speeds(tmp_path, caplog):
    class Full(Script):
        def work(self, kind):
            raise torch.OutOfMemoryError("CUDA out of memory")

    with caplog.at_level("INFO", logger="sdx_accel"):
        assert record_for(FakeCard(), Full(), tmp_path) is None
    assert "could not be measured" in caplog.text
    assert not list(tmp_path.iterdir())


_WRITER = """
import sys
from pathlib import Path
from sdx_accel.runtime.user_cache import write_values
size = int(sys.argv[2])
for _ in range(20):
    assert write_values(Path(sys.argv[1]), "x.json", {"values": [size] * size})
"""


def test_two_processes_write_whole_files(tmp_path):
    write_values(tmp_path, "x.json", {"values": [10] * 10})
    writers = [
        subprocess.Popen([sys.executable, "-c", _WRITER, str(tmp_path), str(size)])
        for size in (10, 1_000)
    ]
    seen = 0
    while any(writer.poll() is None for writer in writers) or not seen:
        values = read_values(tmp_path, "x.json")["values"]
        assert len(values) == values[0]
        seen += 1
    assert [writer.returncode for writer in writers] == [0, 0]
    assert [file.name for file in tmp_path.iterdir()] == ["x.json"]


def test_a_record_of_another_shape_is_none():
    record = Record("k", None, 1.0, 1.0, 1.0, 1.0)
    assert Record.from_values(asdict(record)) == record
    for changed in (
        {"pinned_bytes_per_s": float("nan")},
        {"flops_per_s": -1.0},
        {"context_bytes": "600"},
        {"more": 1},
    ):
        assert Record.from_values({**asdict(record), **changed}) is None
    assert Record.from_values(asdict(replace(record, version=calibration.VERSION + 1))) is None


@pytest.mark.parametrize("kind", ["matmul", "convolution", "attention", "block"])
def test_the_counted_operations_are_those_that_run(kind, monkeypatch):
    from torch.utils.flop_counter import FlopCounterMode

    done, call = getattr(CudaMeasure(torch.device("meta")), f"_{kind}")()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        call()
    assert counter.get_total_flops() == pytest.approx(done, rel=1e-3)


def test_planning_never_measures(monkeypatch):
    """`sdx_accel.plan` reads a record; only a budget that is held measures one."""
    from sdx_accel import api

    class Card(FakeCard):
        def machine(self, record):
            return ("planned with", record)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(api, "open_card", lambda device: Card())
    monkeypatch.setattr(api, "known_record", lambda card: f"record {card.key}")
    monkeypatch.setattr(
        "sdx_accel.runtime.calibration.calibrate", lambda *_: pytest.fail("measured")
    )
    planned = ("planned with", f"record {FakeCard().key}")
    assert api._machine("cuda") == (planned, FakeCard().key)


@pytest.fixture
def card(monkeypatch):
    """A card of 8 GiB that a desktop has 1 GiB of, with 0.5 GiB of this process's context."""
    from sdx_accel.runtime import probe

    monkeypatch.setattr(probe, "_nvml", lambda: None)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda _: SimpleNamespace(name="small card", major=8, minor=6),
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (6 * GIB, 8 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: GIB // 2)
    return probe.Card(torch.device("cuda", 0), None, None)


def test_a_machine_has_the_speeds_of_its_record_and_live_sizes(card, monkeypatch):
    record = Record(card.key, 500 * MIB, 12e9, 10e9, 3e9, 20e12)
    machine = card.machine(record)
    assert machine.link_bytes_per_s == 10e9
    assert machine.pageable_bytes_per_s == 3e9
    assert machine.flops_per_s == 20e12
    # the driver does not tell what this process has: the calibration knew
    assert (machine.non_torch_bytes, machine.source) == (500 * MIB, "measured earlier")
    monkeypatch.setattr(type(card), "non_torch_bytes", lambda _: 512 * MIB)
    machine = card.machine(record)
    assert (machine.non_torch_bytes, machine.source) == (512 * MIB, "measured")
    assert (machine.total_bytes, machine.free_bytes) == (8 * GIB, 7 * GIB)
    assert machine.pinnable_bytes


def test_without_a_record_the_speeds_are_generic(card):
    machine, generic = card.machine(), Machine.generic()
    assert machine.name == "small card"
    assert machine.link_bytes_per_s == generic.link_bytes_per_s
    assert machine.flops_per_s == generic.flops_per_s
    assert (machine.non_torch_bytes, machine.source) == (generic.non_torch_bytes, "generic context")


def test_each_card_and_driver_has_its_own_key(card, monkeypatch):
    from sdx_accel.runtime import probe

    keys = {card.key, replace(card, uuid="GPU-1").key, replace(card, uuid="GPU-2").key}
    monkeypatch.setattr(probe, "_driver", lambda: "580.95")
    keys.add(card.key)
    assert len(keys) == 4


def test_measuring_leaves_the_users_random_numbers_alone(monkeypatch):
    # a picture without a generator of its own would else depend on whether a card was known
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    measure = CudaMeasure(torch.device("cpu"))
    monkeypatch.setattr(measure, "_tiny", lambda: (1.0, lambda: torch.rand(3)), raising=False)
    torch.manual_seed(7)
    expected = torch.rand(4)
    torch.manual_seed(7)
    measure.work("tiny")
    assert torch.equal(torch.rand(4), expected)


def test_streams_are_there_when_the_card_is_read(monkeypatch):
    """torch makes 64 of them with the first, 72 MiB that only a ring would have shown."""
    made = []
    monkeypatch.setattr(torch.cuda, "Stream", made.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: made.append("read"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    device = torch.device("cpu")
    warm_up(device, [])
    assert made == [device, "read"]
