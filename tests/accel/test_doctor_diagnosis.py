"""`diagnose` on machines described as facts: every fault gets its level and its one command."""

import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from sdx_accel.runtime.diagnosis import diagnose
from sdx_accel.runtime.facts import Facts, GpuFacts
from sdx_accel.runtime.findings import FLOORS, TESTED, Diagnosis, Level, Row, release
from sdx_accel.runtime.gpu_diagnosis import build_covers
from sdx_accel.runtime.kernel_cache import KernelCache

ROOT = Path(__file__).resolve().parents[2]
ARCH_LIST = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
PACKAGES = {**TESTED, "sdx-accel": "0.1.0"}
RTX_4060 = GpuFacts(0, "NVIDIA GeForce RTX 4060", "nvidia", (8, 9), 8 << 30, 7 << 30)

CPU_MACHINE = Facts(
    packages={**PACKAGES, "torch": "2.13.0+cpu"},
    ram_total_bytes=32 << 30,
    ram_available_bytes=30 << 30,
    kernel_cache=KernelCache(Path("/home/user/.triton/cache"), "home folder"),
    compiler="/usr/bin/gcc",
)
GPU_MACHINE = replace(
    CPU_MACHINE,
    packages=PACKAGES,
    torch_cuda="13.0",
    cudnn="91200",
    torch_arch_list=ARCH_LIST,
    cuda_usable=True,
    driver="580.95",
    driver_cuda=(13, 0),
    gpus=(RTX_4060,),
)


def card(capability: tuple[int, int] | None, **other: object) -> Facts:
    gpu = replace(RTX_4060, capability=capability)
    return replace(GPU_MACHINE, gpus=(gpu,), **other)


def row(diagnosis: Diagnosis, subject: str) -> Row:
    found = [row for row in diagnosis.rows if row.subject == subject]
    assert len(found) == 1, [row.subject for row in diagnosis.rows]
    return found[0]


@pytest.mark.parametrize("facts", [CPU_MACHINE, GPU_MACHINE], ids=["cpu", "gpu"])
def test_a_sound_machine_has_no_warning_and_exits_with_0(facts: Facts) -> None:
    diagnosis = diagnose(facts)
    assert {row.level for row in diagnosis.rows} == {Level.OK}
    assert diagnosis.exit_code == 0


def test_every_fault_names_what_mends_it_and_nothing_else_does() -> None:
    faulty = replace(
        GPU_MACHINE,
        packages={"torch": "2.5.1"},
        import_errors={"torch": "OSError: no"},
        compiler=None,
        python_headers=False,
        disabled=True,
        kernel_cache=KernelCache(None, "none", ("/x is not writable",)),
    )
    rows = diagnose(faulty).rows
    assert [row for row in rows if (row.mend is None) != (row.level is Level.OK)] == []
    assert diagnose(faulty).exit_code == 1


def test_case_141_cpu_build_of_torch_beside_a_gpu() -> None:
    facts = replace(GPU_MACHINE, packages=CPU_MACHINE.packages, torch_cuda=None, cuda_usable=False)
    found = row(diagnose(facts), "CUDA")
    assert found.level is Level.FAIL
    assert "torch build is CPU-only (2.13.0+cpu)" in found.finding
    # PyPI's build has CUDA; without --force-reinstall pip finds 2.13.0 "already satisfied"
    assert found.mend == "pip install --force-reinstall torch==2.13.0"


def test_case_141_on_windows_names_the_cuda_channel() -> None:
    facts = replace(
        GPU_MACHINE,
        system="Windows",
        packages={**PACKAGES, "torch": "2.13.0+cpu"},
        torch_cuda=None,
        cuda_usable=False,
    )
    mend = row(diagnose(facts), "CUDA").mend
    assert mend is not None
    assert re.search(r"torch==2\.13\.0 --index-url <the cu\d+ index", mend)


@pytest.mark.parametrize(
    ("driver_cuda", "mend"),
    [((12, 4), "cu126"), ((11, 4), "update NVIDIA's driver")],
)
def test_case_140_driver_older_than_the_cuda_build(driver_cuda: tuple[int, int], mend: str) -> None:
    found = row(diagnose(replace(GPU_MACHINE, cuda_usable=False, driver_cuda=driver_cuda)), "CUDA")
    assert found.level is Level.FAIL
    assert f"up to {driver_cuda[0]}.{driver_cuda[1]}" in found.finding
    assert "built for 13.0" in found.finding
    assert mend in (found.mend or "")


def test_case_140_triton_out_of_range() -> None:
    packages = {**PACKAGES, "triton": "3.2.0"}
    facts = replace(GPU_MACHINE, packages=packages, pins=(("torch", "triton", "3.7.1"),))
    found = row(diagnose(facts), "Triton")
    assert found.level is Level.FAIL
    assert "3.2.0 is older than 3.3" in found.finding
    assert found.mend == "pip install triton==3.7.1"


def test_case_140_triton_other_than_torch_asks_for() -> None:
    packages = {**PACKAGES, "triton": "3.9.0"}
    facts = replace(GPU_MACHINE, packages=packages, pins=(("torch", "triton", "3.7.1"),))
    found = row(diagnose(facts), "Triton")
    assert (found.level, found.mend) == (Level.WARN, "pip install triton==3.7.1")


@pytest.mark.parametrize("name", ["torch", "diffusers", "transformers", "accelerate"])
def test_case_140_a_package_whose_binary_does_not_load(name: str) -> None:
    error = f"ImportError: {name}/_C.so: undefined symbol: _ZN3c10"
    found = row(diagnose(replace(GPU_MACHINE, import_errors={name: error})), name)
    assert found.level is Level.FAIL
    assert "undefined symbol" in found.finding
    assert found.mend == f"pip install --force-reinstall {name}=={TESTED[name]}"


def test_case_140_torchvision_for_another_torch_breaks_transformers() -> None:
    facts = replace(
        GPU_MACHINE,
        packages={**PACKAGES, "torchvision": "0.22.0"},
        pins=(("torchvision", "torch", "2.7.0"),),
        import_errors={"transformers": "RuntimeError: operator torchvision::nms does not exist"},
    )
    found = row(diagnose(facts), "transformers")
    assert (found.level, found.mend) == (
        Level.FAIL,
        "pip install --force-reinstall torchvision",
    )


def test_case_140_xformers_for_another_torch_is_not_needed() -> None:
    packages = {**PACKAGES, "xformers": "0.0.30"}
    facts = replace(GPU_MACHINE, packages=packages, pins=(("xformers", "torch", "2.7.0"),))
    found = row(diagnose(facts), "xformers")
    assert (found.level, found.mend) == (Level.WARN, "pip uninstall xformers")
    assert diagnose(facts).exit_code == 0


@pytest.mark.parametrize("name", list(FLOORS))
def test_a_package_below_its_floor_blocks(name: str) -> None:
    packages = {**PACKAGES, name: "0.1.0"}
    found = row(
        diagnose(replace(GPU_MACHINE, packages=packages)), "Triton" if name == "triton" else name
    )
    assert found.level is Level.FAIL
    assert f">={FLOORS[name]}" in (found.mend or "")


@pytest.mark.parametrize("name", ["torch", "triton", "diffusers", "transformers"])
def test_a_newer_release_than_tested_is_said_and_does_not_block(name: str) -> None:
    packages = {**PACKAGES, name: "99.0.0"}
    found = row(
        diagnose(replace(GPU_MACHINE, packages=packages)), "Triton" if name == "triton" else name
    )
    assert found.level is Level.OK
    assert "the newest tested" in found.finding


@pytest.mark.parametrize(
    ("system", "distribution"), [("Linux", "triton"), ("Windows", "triton-windows")]
)
def test_case_143_without_triton_one_calm_line(system: str, distribution: str) -> None:
    packages = {name: version for name, version in PACKAGES.items() if name != "triton"}
    facts = replace(
        GPU_MACHINE, system=system, packages=packages, triton_error="No module named 'triton'"
    )
    diagnosis = diagnose(facts)
    found = row(diagnosis, "Triton")
    assert found.level is Level.WARN
    assert "torch's kernels run instead" in found.finding
    assert distribution in (found.mend or "")
    assert "torch's kernels" in row(diagnosis, "on GPU 0").finding
    assert diagnosis.exit_code == 0


@pytest.mark.parametrize(
    "error",
    ["OSError: libtriton.so: cannot open shared object", "RuntimeError: 0 active drivers"],
)
def test_case_143_triton_that_raises_on_import(error: str) -> None:
    blocked = diagnose(replace(GPU_MACHINE, triton_error=error))
    assert row(blocked, "Triton").level is Level.FAIL
    assert error in row(blocked, "Triton").finding
    # without a GPU nothing would use it
    assert row(diagnose(replace(CPU_MACHINE, triton_error=error)), "Triton").level is Level.WARN


def test_macos_has_no_triton_row() -> None:
    apple = GpuFacts(0, "Apple GPU", "apple")
    diagnosis = diagnose(replace(CPU_MACHINE, system="Darwin", gpus=(apple,)))
    assert "Triton" not in {row.subject for row in diagnosis.rows}
    assert "Apple's GPU" in row(diagnosis, "on GPU 0").finding
    assert diagnosis.exit_code == 0


@pytest.mark.parametrize("vendor", ["amd", "intel", "apple"])
def test_other_vendors_get_one_sentence(vendor: str) -> None:
    diagnosis = diagnose(replace(CPU_MACHINE, gpus=(GpuFacts(0, "A card", vendor),)))
    found = row(diagnosis, "on GPU 0")
    assert found.level is Level.OK
    assert "torch's kernels run" in found.finding


@pytest.mark.parametrize(
    ("capability", "kernels", "dtype"),
    [
        ((6, 1), "torch's kernels", "dtype fp32"),
        ((7, 0), "torch's kernels", "dtype fp16"),
        ((7, 5), "torch's kernels", "dtype fp16"),
        ((8, 0), "our Triton kernels", "dtype fp16 (bf16"),
        ((8, 6), "our Triton kernels", "dtype fp16 (bf16"),
        ((8, 9), "our Triton kernels", "dtype fp16 (bf16"),
        ((9, 0), "our Triton kernels", "dtype fp16 (bf16"),
        ((10, 0), "our Triton kernels", "dtype fp16 (bf16"),
        ((12, 0), "our Triton kernels", "dtype fp16 (bf16"),
    ],
)
def test_what_runs_by_capability(capability: tuple[int, int], kernels: str, dtype: str) -> None:
    found = row(diagnose(card(capability, torch_arch_list=())), "on GPU 0")
    assert found.finding.startswith(kernels)
    assert dtype in found.finding
    if capability < (8, 0):
        assert "no tensor-core path" in found.finding


@pytest.mark.parametrize(
    ("capability", "channel"), [((6, 1), "cu126"), ((7, 0), "cu126"), ((13, 0), "cu130")]
)
def test_a_card_that_the_torch_build_has_no_code_for(
    capability: tuple[int, int], channel: str
) -> None:
    found = row(diagnose(card(capability)), "on GPU 0")
    assert found.level is Level.FAIL
    assert f"no code for sm_{capability[0]}{capability[1]}" in found.finding
    assert channel in (found.mend or "")


@pytest.mark.parametrize(
    ("arch_list", "capability", "covered"),
    [
        (("sm_80",), (8, 9), True),
        (("sm_86",), (8, 0), False),
        (("sm_80",), (9, 0), False),
        (("sm_80", "compute_80"), (12, 0), True),
        (("sm_90a",), (9, 0), True),
        (("sm_100a",), (10, 3), False),
        (("sm_100", "sm_120"), (12, 0), True),
        (("gfx942",), (8, 0), False),
        ((), (6, 1), True),
    ],
)
def test_which_builds_run_on_which_card(
    arch_list: tuple[str, ...], capability: tuple[int, int], covered: bool
) -> None:
    assert build_covers(arch_list, capability) is covered


def test_hidden_gpus_are_not_a_blocker() -> None:
    found = row(diagnose(replace(GPU_MACHINE, cuda_usable=False, visible_devices="-1")), "CUDA")
    assert (found.level, found.mend) == (Level.WARN, "unset CUDA_VISIBLE_DEVICES")


def test_a_card_without_a_driver() -> None:
    found = row(diagnose(replace(CPU_MACHINE, nvidia_on_bus=True)), "GPU")
    assert found.level is Level.WARN
    assert "--gpus all" in (found.mend or "")


def test_cuda_that_fails_says_what_torch_said() -> None:
    facts = replace(GPU_MACHINE, cuda_usable=False, cuda_error="CUDA unknown error")
    found = row(diagnose(facts), "CUDA")
    assert found.level is Level.FAIL
    assert "CUDA unknown error" in found.finding


def test_a_gpu_machine_needs_a_compiler_and_headers() -> None:
    facts = replace(GPU_MACHINE, compiler=None, python_headers=False)
    diagnosis = diagnose(facts)
    assert row(diagnosis, "C compiler").mend == "sudo apt install gcc (or your system's)"
    assert "python3.11-dev" in (row(diagnosis, "C headers").mend or "")
    assert len(diagnosis.blockers) == 2
    # a Turing card and a CPU compile nothing
    assert diagnose(replace(facts, gpus=(replace(RTX_4060, capability=(7, 5)),))).exit_code == 0
    assert diagnose(replace(CPU_MACHINE, compiler=None, python_headers=False)).exit_code == 0


def test_case_107_unknown_memory_is_called_unknown() -> None:
    gpu = replace(RTX_4060, total_bytes=None, free_bytes=None)
    facts = replace(GPU_MACHINE, gpus=(gpu,), ram_total_bytes=None, ram_available_bytes=None)
    diagnosis = diagnose(facts)
    assert "memory unknown" in row(diagnosis, "GPU 0").finding
    assert row(diagnosis, "RAM").finding == "unknown, available unknown"
    half_known = replace(GPU_MACHINE, gpus=(replace(RTX_4060, free_bytes=None),))
    assert "8.0 GiB, free unknown" in row(diagnose(half_known), "GPU 0").finding


def test_case_145_cache_folders_that_cannot_be_used() -> None:
    moved = KernelCache(Path("/tmp/x"), "private temporary folder", ("/.triton is not writable",))
    found = row(diagnose(replace(GPU_MACHINE, kernel_cache=moved)), "kernel cache")
    assert found.level is Level.WARN
    assert "/tmp/x" in found.finding
    assert "/.triton is not writable" in found.finding
    nowhere = KernelCache(None, "none", ("/.triton is not writable",))
    blocked = row(diagnose(replace(GPU_MACHINE, kernel_cache=nowhere)), "kernel cache")
    assert blocked.level is Level.FAIL
    assert "TRITON_CACHE_DIR" in (blocked.mend or "")


def test_the_off_switch_a_container_limit_and_wsl_are_shown() -> None:
    facts = replace(CPU_MACHINE, disabled=True, ram_limit_bytes=4 << 30, wsl=True)
    diagnosis = diagnose(facts)
    assert row(diagnosis, "SDX_DISABLE").mend == "unset SDX_DISABLE"
    assert "may use 4.0 GiB" in row(diagnosis, "RAM").finding
    assert "WSL pins only" in row(diagnosis, "RAM").finding


def test_the_registry_s_own_answer_is_shown() -> None:
    gpu = replace(RTX_4060, attention="sdpa, because it is faster here")
    found = row(diagnose(replace(GPU_MACHINE, gpus=(gpu,))), "on GPU 0")
    assert found.finding.startswith("sdpa, because it is faster here; dtype fp16")


def test_floors_are_those_of_the_packaging() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = dict(
        re.match(r"([\w-]+)>=([\d.]+)", line).groups() for line in project["dependencies"]
    )
    assert {name: declared[name] for name in FLOORS} == dict(FLOORS)
    assert project["requires-python"] == ">=3.11"


def test_tested_releases_are_those_of_the_constraints() -> None:
    pinned = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    )
    assert {name: pinned[name] for name in TESTED} == dict(TESTED)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("2.13.0+cpu", (2, 13, 0)),
        ("3.3.0.post19", (3, 3, 0)),
        ("2.9.0a0", (2, 9, 0)),
        ("5.24.0.dev0", (5, 24, 0)),
        ("nightly", ()),
    ],
)
def test_release_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert release(text) == numbers


def test_an_old_python_blocks() -> None:
    found = row(diagnose(replace(CPU_MACHINE, python=(3, 10, 4))), "Python")
    assert found.level is Level.FAIL
    assert "3.10.4 is older than 3.11" in found.finding


@pytest.mark.parametrize("name", ["torch", "diffusers", "transformers", "accelerate"])
def test_a_package_that_is_not_there_blocks(name: str) -> None:
    packages = {other: version for other, version in PACKAGES.items() if other != name}
    found = row(diagnose(replace(CPU_MACHINE, packages=packages)), name)
    assert (found.level, found.mend) == (Level.FAIL, f"pip install {name}=={TESTED[name]}")


def test_what_only_waits_for_torch_is_no_blocker_of_its_own() -> None:
    errors = {"torch": "OSError: libcudart.so.13", "diffusers": "ImportError: torch"}
    diagnosis = diagnose(replace(GPU_MACHINE, import_errors=errors))
    assert [blocker.subject for blocker in diagnosis.blockers] == ["torch"]
    assert row(diagnosis, "diffusers").mend == "mend torch first"
    assert row(diagnosis, "CUDA").mend == "mend torch first"


def test_torchvision_for_another_torch_is_a_warning_while_all_imports_work() -> None:
    packages = {**PACKAGES, "torchvision": "0.22.0"}
    facts = replace(GPU_MACHINE, packages=packages, pins=(("torchvision", "torch", "2.7.0"),))
    found = row(diagnose(facts), "torchvision")
    assert (found.level, found.mend) == (
        Level.WARN,
        "pip install --force-reinstall torchvision",
    )
    matching = replace(facts, pins=(("torchvision", "torch", "2.13.0"),))
    assert "torchvision" not in {row.subject for row in diagnose(matching).rows}


def test_what_torch_is_built_for() -> None:
    assert row(diagnose(GPU_MACHINE), "torch").finding == (
        "2.13.0; built for CUDA 13.0, cuDNN 91200"
    )
    assert row(diagnose(replace(GPU_MACHINE, cudnn=None)), "torch").finding == (
        "2.13.0; built for CUDA 13.0"
    )
    rocm = replace(CPU_MACHINE, torch_hip="6.4")
    assert row(diagnose(rocm), "torch").finding == "2.13.0+cpu; built for ROCm 6.4"
    assert row(diagnose(CPU_MACHINE), "torch").finding == "2.13.0+cpu; a build for the CPU"
    assert row(diagnose(replace(CPU_MACHINE, system="Darwin")), "torch").finding == "2.13.0+cpu"


def test_the_driver_is_shown_as_far_as_it_is_known() -> None:
    assert row(diagnose(GPU_MACHINE), "driver").finding == "NVIDIA 580.95, CUDA up to 13.0"
    unknown = replace(GPU_MACHINE, driver_cuda=None)
    assert row(diagnose(unknown), "driver").finding == "NVIDIA 580.95"


def test_a_container_s_limit_is_shown_only_where_it_limits() -> None:
    def finding(total: int | None, limit: int | None) -> str:
        facts = replace(CPU_MACHINE, ram_total_bytes=total, ram_limit_bytes=limit)
        return row(diagnose(facts), "RAM").finding

    assert "may use" not in finding(32 << 30, 64 << 30)
    assert "may use" not in finding(None, None)
    assert "may use 4.0 GiB" in finding(None, 4 << 30)
