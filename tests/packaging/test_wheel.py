"""The wheel: what is in it, built directly and by way of the sdist, and that it runs installed."""

import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import sdx_accel

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"sdx_accel", "sdx_kernels", "sdx_patches"}


def build(source: Path, out: Path, *what: str) -> Path:
    """Build with what is installed; `--no-isolation` keeps it off the network."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), *what]
    done = subprocess.run(
        [*command, str(source)], cwd=out, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl" if "--wheel" in what else "*.tar.gz")
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("wheel"), "--wheel")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("sdist"), "--sdist")


def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return sorted(archive.namelist())


def test_the_wheel_holds_our_three_packages_and_nothing_else(wheel: Path) -> None:
    top = {name.split("/")[0] for name in names(wheel)}
    (metadata,) = top - PACKAGES
    assert metadata == f"sdx_accel-{sdx_accel.__version__}.dist-info"
    assert top - {metadata} == PACKAGES


def test_the_wheel_is_typed_and_licensed(wheel: Path) -> None:
    inside = names(wheel)
    for package in PACKAGES:
        assert f"{package}/py.typed" in inside
    metadata = f"sdx_accel-{sdx_accel.__version__}.dist-info"
    assert {f"{metadata}/licenses/{name}" for name in ("LICENSE", "NOTICE")} <= set(inside)


def test_the_wheel_has_every_source_file(wheel: Path) -> None:
    inside = set(names(wheel))
    for root in (ROOT, ROOT / "kernels", ROOT / "patches"):
        for package in PACKAGES:
            for path in (root / package).rglob("*.py"):
                assert path.relative_to(root).as_posix() in inside


def test_the_wheel_has_the_demo_model_as_it_is_in_the_tree(wheel: Path) -> None:
    folder = ROOT / "sdx_accel" / "demo" / "model"
    here = {path.relative_to(ROOT).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    assert sum(name.endswith(".safetensors") for name in here) == 4
    with zipfile.ZipFile(wheel) as archive:
        inside = {i.filename: i for i in archive.infolist() if "/demo/model/" in i.filename}
        assert set(inside) == set(here)
        for name, path in here.items():
            assert archive.read(name) == path.read_bytes()
            # readable by everybody where it is installed for everybody
            assert inside[name].external_attr >> 16 & 0o777 == 0o644


def test_the_wheel_is_small_and_has_no_pictures(wheel: Path) -> None:
    """The demo model is what it learnt, not what it learnt from."""
    suffixes = {Path(name).suffix for name in names(wheel)}
    assert not suffixes & {".png", ".jpg", ".webp", ".svg", ".npz", ".npy", ".pt", ".bin", ".pkl"}
    assert wheel.stat().st_size < 23 << 20


def test_the_sdist_builds_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    out = tmp_path / "out"
    out.mkdir()
    assert names(build(source, out, "--wheel")) == names(wheel)


def test_the_sdist_has_what_a_packager_needs(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "LICENSE",
        "NOTICE",
        "README.md",
        "CHANGELOG.md",
        "constraints.txt",
        "Makefile",
    } <= inside
    assert any(name.startswith("tests/") for name in inside)
    assert not any(part in name for name in inside for part in ("__pycache__", ".venv", "outputs/"))


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel; the dependencies are lent by a `.pth` of their folder.

    A folder named in a `.pth` has its own `.pth` files ignored, so our editable install stays out.
    """
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=False, symlinks=sys.platform != "win32")
    python = folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
        + ["install", "--quiet", "--no-deps", "--no-index", str(wheel)],
        check=True,
    )
    (Path(site) / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python.parent


def installed(clean: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [clean / program, *arguments], cwd=clean, capture_output=True, text=True, check=False
    )


def test_the_installed_wheel_is_what_runs(clean: Path) -> None:
    code = "import sdx_accel, sdx_kernels, sdx_patches as p; print(sdx_accel.__file__, p.__file__)"
    done = installed(clean, "python", "-c", code)
    assert done.returncode == 0, done.stderr
    assert [Path(file).is_relative_to(clean.parent) for file in done.stdout.split()] == [True, True]


def test_the_installed_command_answers(clean: Path) -> None:
    done = installed(clean, "sdx-accel", "--help")
    assert done.returncode == 0, done.stderr
    for verb in ("generate", "plan", "doctor"):
        assert verb in done.stdout


def test_the_installed_command_makes_a_picture(clean: Path, tmp_path: Path) -> None:
    done = installed(
        clean, "sdx-accel", "generate", "a red apple", "--steps", "1", "--output", str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    (picture,) = tmp_path.iterdir()
    assert done.stdout.rstrip().endswith(str(picture))


def test_hugging_faces_kernels_stays_whole_beside_the_wheel(clean: Path) -> None:
    done = installed(clean, "python", "-c", "from kernels import get_kernel")
    assert done.returncode == 0, done.stderr
