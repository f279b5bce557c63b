"""Host memory: what may be pinned, and what `--ram` means and refuses."""

import pytest

import sdx_accel
from sdx_accel.budget.units import GIB, MIB
from sdx_accel.errors import BudgetError, RefusedError
from sdx_accel.runtime import host_memory
from sdx_accel.runtime.checkpoints import load
from sdx_accel.runtime.enforce import spill_note
from sdx_accel.runtime.host_memory import (
    HostLimits,
    limits,
    parse_ram,
    pinnable_bytes,
    resolve_ram,
)


def _machine(root, *, total=16, available=10, used=1, cgroup=None, release="6.8.0-generic"):
    """A file tree as Linux shows it; sizes in GiB."""
    files = {
        "proc/meminfo": f"MemTotal: {total << 20} kB\nMemFree: 1 kB\n"
        f"MemAvailable: {available << 20} kB\nHugePages_Total: 0\n",
        "proc/self/status": f"Name:\tpython\nVmRSS:\t {used << 20} kB\n",
        "proc/sys/kernel/osrelease": release + "\n",
        "proc/self/cgroup": "0::/user\n",
        "sys/fs/cgroup/user/memory.max": "max\n" if cgroup is None else f"{cgroup << 30}\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return limits(root)


def test_limits_are_read_from_linux(tmp_path):
    host = _machine(tmp_path, cgroup=12)
    assert host == HostLimits(16 * GIB, 10 * GIB, cgroup=12 * GIB, used=GIB)
    assert host.size == 12 * GIB


def test_unreadable_limits_are_unknown(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("nothing here\n")
    assert limits(tmp_path) == HostLimits(None, None)
    assert pinnable_bytes(HostLimits(None, None)) is None


def test_without_linux_files_the_portable_reading_counts(tmp_path):
    host = limits(tmp_path)
    assert host.total
    assert host.available
    assert host.used > 0
    assert host.available <= host.total


def test_pinning_follows_what_this_process_has_and_could_take(tmp_path):
    # 10 available and 1 ours: 80 % of 11 GiB, in whole GiB so that plans stay equal
    assert pinnable_bytes(_machine(tmp_path)) == 8 * GIB
    # the same weights, loaded now: what may be pinned has not changed
    assert pinnable_bytes(_machine(tmp_path, available=4, used=7)) == 8 * GIB
    assert pinnable_bytes(_machine(tmp_path, available=1, used=0)) == round(0.8 * GIB) // MIB * MIB


def test_cgroup_limits_pinning(tmp_path):
    assert pinnable_bytes(_machine(tmp_path, total=187, available=180, cgroup=46)) == 36 * GIB


def test_wsl_limits_pinning(tmp_path):
    host = _machine(tmp_path, total=64, available=60, release="5.15.153.1-microsoft-standard-WSL2")
    assert host.wsl
    assert pinnable_bytes(host) == round(0.75 * GIB)


def test_windows_limits_pinning(monkeypatch, tmp_path):
    monkeypatch.setattr(host_memory.platform, "system", lambda: "Windows")
    assert limits(tmp_path).windows
    assert pinnable_bytes(HostLimits(32 * GIB, 30 * GIB, windows=True)) == round(0.4 * 32 * GIB)


HOST = HostLimits(16 * GIB, 8 * GIB, used=2 * GIB)


@pytest.mark.parametrize(
    ("text", "gib"), [("6", 6), ("6.5GiB", 6.5), ("auto", 9.5), ("50%", 8), ("-4", 6), (6, 6)]
)
def test_ram_has_the_forms_of_vram(text, gib):
    assert resolve_ram(parse_ram(text), HOST) == (gib * GIB, None)


def test_more_ram_than_there_is_is_planned_for_what_there_is():
    allowed, note = resolve_ram(parse_ram("64"), HOST)
    assert allowed == 10 * GIB
    assert note == "host memory: 64.00 GiB asked, 10.00 GiB free: planned for that"


@pytest.mark.parametrize("text", ["", "lots", "0", "120%", "8 TB"])
def test_nonsense_is_refused_under_its_own_name(text):
    with pytest.raises(RefusedError, match="--ram"):
        parse_ram(text)


def test_a_relative_amount_of_unknown_memory_is_refused():
    with pytest.raises(RefusedError, match="give a number of GiB"):
        resolve_ram(parse_ram("80%"), HostLimits(None, None))
    assert resolve_ram(parse_ram("4"), HostLimits(None, None)) == (4 * GIB, None)
    with pytest.raises(RefusedError, match="--ram -20 GiB leaves nothing"):
        resolve_ram(parse_ram("-20"), HOST)


def test_ram_refuses_before_loading_case_105(cli, monkeypatch):
    monkeypatch.setattr(
        "sdx_accel.runtime.checkpoints.load", lambda *_, **__: pytest.fail("loaded")
    )
    result = cli("generate", "x", "--ram", 0.001)
    assert result.code == 2
    assert "GiB of host memory, 0.00 GiB are allowed" in result.err
    assert "--ram" in result.err
    assert "--vram" not in result.err.splitlines()[-1]


def test_a_plan_says_how_much_memory_is_missing():
    short = sdx_accel.plan("random:sdxl-tiny", vram=8, ram=0.001, device="cpu")
    assert not short.feasible
    assert short.machine.ram_bytes == round(0.001 * GIB)
    assert "host memory" in short.shortfall()
    enough = sdx_accel.plan("random:sdxl-tiny", vram=8, ram=2, device="cpu")
    assert enough.feasible


def test_a_held_pipeline_refuses_calls_beyond_ram(tmp_path):
    pipe = load("random:sdxl-tiny", dtype="fp32")
    pipe.enable_xattn(vram=8, ram=0.001, device="cpu")
    with pytest.raises(BudgetError, match=r"host memory.*give ram a larger amount") as refusal:
        pipe("x", height=64, width=64, num_inference_steps=1)
    assert "try vram" not in str(refusal.value)
    pipe.enable_xattn(vram=8, ram=1, device="cpu")
    pipe.set_progress_bar_config(disable=True)
    pipe("x", height=64, width=64, num_inference_steps=1, output_type="latent")
    with pytest.raises(RefusedError, match="give vram as well"):
        pipe.enable_xattn(ram=1)
    with pytest.raises(RefusedError, match="pipeline"):
        pipe.unet.enable_xattn(ram=1)


@pytest.mark.parametrize(
    ("seconds", "predicted", "host", "said"),
    [
        (4.0, 0.6, HostLimits(None, None, windows=True), True),
        (4.0, 0.6, HostLimits(None, None, wsl=True), True),
        # elsewhere the driver refuses memory instead
        (4.0, 0.6, HostLimits(None, None), False),
        (1.0, 0.6, HostLimits(None, None, windows=True), False),
        (None, 0.6, HostLimits(None, None, windows=True), False),
        (4.0, 0.0, HostLimits(None, None, windows=True), False),
    ],
)
def test_a_spill_is_suspected_in_one_sentence(seconds, predicted, host, said):
    note = spill_note(seconds, predicted, host)
    assert (note is not None) is said
    assert note is None or "Prefer No Sysmem Fallback" in note
