"""The probes behind `doctor`: whatever a driver or a folder answers, they give facts."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sdx_accel.cli import main
from sdx_accel.runtime import gathering
from sdx_accel.runtime.facts import Facts, GpuFacts, known_bytes, memory_pair
from sdx_kernels import target

GIB = 1 << 30


@pytest.mark.parametrize(
    ("total", "free", "expected"),
    [
        (8 * GIB, 7 * GIB, (8 * GIB, 7 * GIB)),
        (8 * GIB, 8 * GIB, (8 * GIB, 8 * GIB)),
        (8 * GIB, 0, (8 * GIB, 0)),
        (8 * GIB, 9 * GIB, (8 * GIB, None)),
        (None, None, (None, None)),
        (0, 0, (None, None)),
        (-1, 5, (None, 5)),
        (float("inf"), math.nan, (None, None)),
        (2**63 - 4096, 1e32, (None, None)),
        ("8 GiB", True, (None, None)),
    ],
)
def test_case_107_memory_is_a_sane_integer_or_unknown(
    total: object, free: object, expected: tuple[int | None, int | None]
) -> None:
    assert memory_pair(total, free) == expected
    assert all(value is None or isinstance(value, int) for value in memory_pair(total, free))
    assert known_bytes(1e32) is None


def fake_nvml(memory: Callable[[object], object], **other: Any) -> SimpleNamespace:
    calls: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetCudaDriverVersion_v2": lambda: 12040,
        "nvmlSystemGetDriverVersion": lambda: b"550.54",
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetName": lambda card: "NVIDIA A2000",
        "nvmlDeviceGetCudaComputeCapability": lambda card: (8, 6),
    }
    return SimpleNamespace(**{**calls, **other})


def raises(*_: object) -> Any:
    raise RuntimeError("Not Supported")


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (lambda card: SimpleNamespace(total=6 * GIB, free=5 * GIB), (6 * GIB, 5 * GIB)),
        (lambda card: SimpleNamespace(total=5, free=6 * GIB), (5, None)),
        (lambda card: SimpleNamespace(total=2**64 - 1, free=2**64 - 1), (None, None)),
        (lambda card: None, (None, None)),
        (raises, (None, None)),
    ],
)
def test_case_107_whatever_the_driver_answers(
    monkeypatch: pytest.MonkeyPatch,
    memory: Callable[[object], object],
    expected: tuple[int | None, int | None],
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(memory))
    facts = gathering.gather()
    assert (facts.driver, facts.driver_cuda) == ("550.54", (12, 4))
    (gpu,) = facts.gpus
    assert (gpu.name, gpu.capability) == ("NVIDIA A2000", (8, 6))
    assert (gpu.total_bytes, gpu.free_bytes) == expected


def test_a_driver_that_only_counts_its_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = fake_nvml(
        raises,
        nvmlSystemGetCudaDriverVersion_v2=raises,
        nvmlSystemGetDriverVersion=raises,
        nvmlDeviceGetName=raises,
        nvmlDeviceGetCudaComputeCapability=raises,
    )
    monkeypatch.setitem(sys.modules, "pynvml", silent)
    facts = gathering.gather()
    assert (facts.driver, facts.driver_cuda) == (None, None)
    assert facts.gpus[0].capability is None


def test_case_140_an_import_error_of_any_kind_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    real = gathering.importlib.import_module

    def broken(name: str) -> Any:
        if name == "diffusers":
            raise SystemError("undefined symbol: _ZN3c10\n  and more")
        return real(name)

    monkeypatch.setattr(gathering.importlib, "import_module", broken)
    errors = gathering.gather().import_errors
    assert errors == {"diffusers": "SystemError: undefined symbol: _ZN3c10 and more"}


def test_pins_are_read_from_what_packages_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asks = {
        "torch": ["filelock", 'triton==3.7.1; platform_system == "Linux"'],
        "xformers": ["numpy", "torch==2.7.0"],
        "torchvision": None,
    }
    monkeypatch.setattr(gathering.importlib.metadata, "requires", asks.__getitem__)
    pins = list(gathering._pins({"torch": "2.13.0", "xformers": "0.0.30", "torchvision": "0.22"}))
    assert pins == [("torch", "triton", "3.7.1"), ("xformers", "torch", "2.7.0")]


@pytest.mark.parametrize("error", ["OSError: libtriton.so", "RuntimeError: 0 active drivers"])
def test_case_143_what_triton_raised_is_a_fact(monkeypatch: pytest.MonkeyPatch, error: str) -> None:
    monkeypatch.setattr(target, "triton_status", lambda: (False, error))
    assert gathering.gather().triton_error == error


def test_case_143_a_kernels_package_that_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(target, "triton_status", raises)
    assert gathering.gather().triton_error == "RuntimeError: Not Supported"


def fake_torch(hip: str | None, xpu: bool, mps: bool) -> SimpleNamespace:
    return SimpleNamespace(
        version=SimpleNamespace(cuda=None, hip=hip),
        cuda=SimpleNamespace(
            is_available=lambda: hip is not None,
            device_count=lambda: 1,
            mem_get_info=lambda index: (15 * GIB, 16 * GIB),
            get_device_name=lambda index: "Radeon RX 7800",
        ),
        xpu=SimpleNamespace(is_available=lambda: xpu),
        backends=SimpleNamespace(mps=SimpleNamespace(is_available=lambda: mps)),
    )


@pytest.mark.parametrize(
    ("torch", "vendors"),
    [
        (fake_torch("6.4", False, False), ["amd"]),
        (fake_torch(None, True, False), ["intel"]),
        (fake_torch(None, False, True), ["apple"]),
        (fake_torch(None, False, False), []),
        (SimpleNamespace(version=SimpleNamespace(hip=None)), []),
    ],
)
def test_other_vendors_are_found_through_torch(torch: Any, vendors: list[str]) -> None:
    gpus = gathering._other_gpus(torch)["gpus"]
    assert [gpu.vendor for gpu in gpus] == vendors
    if vendors == ["amd"]:
        assert (gpus[0].total_bytes, gpus[0].free_bytes) == (16 * GIB, 15 * GIB)


@pytest.mark.parametrize(
    ("files", "membership", "expected"),
    [
        ({"memory.max": "max"}, "0::/", None),
        ({"memory.max": "4294967296"}, "0::/", 4 * GIB),
        ({"a/memory.max": "8589934592", "a/b/memory.max": "max"}, "0::/a/b", 8 * GIB),
        ({"memory/memory.limit_in_bytes": "9223372036854771712"}, "4:memory:/", None),
        ({"memory/d/memory.limit_in_bytes": "1073741824"}, "4:memory:/d\n3:cpu:/x", GIB),
        ({}, "0::/", None),
    ],
)
def test_case_107_a_container_s_limit_without_its_sentinels(
    tmp_path: Path, files: dict[str, str], membership: str, expected: int | None
) -> None:
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    assert gathering.cgroup_limit(tmp_path, membership) == expected


def test_a_compiler_named_by_cc_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert gathering._compiler() is None


def test_this_machine_is_described_without_a_failing_probe() -> None:
    facts = gathering.gather()
    assert isinstance(facts, Facts)
    assert facts.python == sys.version_info[:3]
    assert facts.import_errors == {}
    assert facts.packages["torch"]
    assert facts.ram_total_bytes is not None


@dataclass(frozen=True)
class Answer:
    exit_code: int
    out: str
    err: str


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """The verb, run in this process, which has torch already."""

    def run(*arguments: str) -> Answer:
        exit_code = main(["doctor", *arguments])
        said = capsys.readouterr()
        return Answer(exit_code, said.out, said.err)

    return run


def test_the_verb_prints_one_line_for_each_row() -> None:
    """In a process of its own: nothing but the report is printed, on any stream."""
    done = subprocess.run(
        [sys.executable, "-m", "sdx_accel", "doctor", "--warm"],
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "SDX_DISABLE": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "OK    torch" in done.stdout
    assert "WARN  SDX_DISABLE" in done.stdout
    assert "→ unset SDX_DISABLE" in done.stdout
    assert "nothing to warm" in done.stdout
    assert done.stdout.rstrip().endswith("Nothing blocks.")


def test_a_blocker_is_counted_and_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, doctor: Callable[..., Answer]
) -> None:
    """Case 141, by the verb: a GPU beside a CPU build of torch."""
    here = gathering.gather()
    gpu = GpuFacts(0, "NVIDIA GeForce RTX 4060", "nvidia", (8, 9))
    broken = replace(here, gpus=(gpu,), torch_cuda=None, cuda_usable=False)
    monkeypatch.setattr(gathering, "gather", lambda: broken)
    answer = doctor()
    assert answer.exit_code == 1
    assert "FAIL  CUDA" in answer.out
    assert "torch build is CPU-only" in answer.out
    assert "1 blocker" in answer.out
    report = json.loads(doctor("--json").out)
    assert (doctor("--json").exit_code, report["blockers"]) == (1, 1)


def test_case_145_the_verb_as_json_shows_the_folder_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, doctor: Callable[..., Answer]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setenv("TRITON_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    report = json.loads(doctor("--json").out)
    row = next(row for row in report["rows"] if row["subject"] == "kernel cache")
    assert row["level"] == "WARN"
    assert str(tmp_path / ".triton" / "cache") in row["finding"]
    assert report["facts"]["packages"]["torch"]


def test_case_129_a_broken_file_is_refused_with_its_name(
    tmp_path: Path, doctor: Callable[..., Answer]
) -> None:
    page = tmp_path / "model.safetensors"
    page.write_text("<!DOCTYPE html><html><body>404</body></html>")
    answer = doctor("--model", str(page))
    assert answer.exit_code == 2
    assert "Traceback" not in answer.err
    assert "model.safetensors" in answer.err
    assert "HTML" in answer.err


def test_case_129_as_json_the_refusal_is_json_too(
    tmp_path: Path, doctor: Callable[..., Answer]
) -> None:
    answer = doctor("--json", "--model", str(tmp_path / "absent.safetensors"))
    assert answer.exit_code == 2
    assert json.loads(answer.out)["error"]["exit_code"] == 2


def test_a_sound_model_gets_a_line(doctor: Callable[..., Answer]) -> None:
    answer = doctor("--model", "random:sdxl-tiny")
    assert answer.exit_code == 0, answer.err
    assert "StableDiffusionXLPipeline" in answer.out
