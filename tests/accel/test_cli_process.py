"""The command line as a process of its own: start-up, signals, locales, neighbours."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

COMMAND = [sys.executable, "-m", "sdx_accel"]
SMALL = ["--model", "random:sdxl-tiny", "--width", "64", "--height", "64", "--steps", "1"]


def environment(**changes: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SDX_")}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **changes}


def start(arguments: list[str], folder: Path, **changes: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=folder,
        env=environment(**changes),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # a test runner in the background may have SIGINT ignored, which children inherit
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
    )


@pytest.mark.parametrize("verb", [[], ["generate"], ["plan"], ["doctor"], ["bench"]])
def test_help_answers_without_torch(tmp_path: Path, verb: list[str]) -> None:
    program = (
        "import sys; from sdx_accel.cli import main\n"
        f"code = main({[*verb, '--help']!r})\n"
        "heavy = {'torch', 'diffusers', 'transformers', 'triton', 'numpy', 'PIL'}\n"
        "print(code, sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment(), capture_output=True
    )
    lines = done.stdout.decode().splitlines()
    assert lines[-1] == "0 []", done.stderr.decode()
    assert any("--" in line for line in lines)


def test_version(tmp_path: Path) -> None:
    import sdx_accel

    process = start(["--version"], tmp_path)
    assert process.communicate()[0].decode().strip() == f"sdx-accel {sdx_accel.__version__}"
    assert process.returncode == 0


def test_case_138_ctrl_c_while_sampling_leaves_nothing_half_written(tmp_path: Path) -> None:
    process = start(["generate", "x", *SMALL[:-1], "1000", "--num", "9"], tmp_path)
    assert process.stderr is not None
    seen = b""
    for line in process.stderr:
        seen += line
        if b"step 1/1000" in line:
            break
    else:
        pytest.fail(seen.decode())
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err.decode()
    assert b"Traceback" not in err
    assert b"finished pictures: none" in err
    assert list((tmp_path / "outputs").iterdir()) == []


def test_case_138_four_processes_one_folder_four_files(tmp_path: Path) -> None:
    # forked after the slow imports, which are not what is tested; each child has a standard
    # output of its own, because a pipe that four share may mix their lines
    program = (
        "import os, sys, time\n"
        "from sdx_accel.cli import main\n"
        "import sdx_accel.api, sdx_accel.cli.run_job, diffusers\n"
        "diffusers.StableDiffusionXLPipeline\n"
        "begin = time.time() + 0.5\n"
        "children = []\n"
        "for number in range(4):\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        os.dup2(os.open(f'{number}.txt', os.O_CREAT | os.O_WRONLY), 1)\n"
        "        time.sleep(max(begin - time.time(), 0))\n"
        "        code = main(sys.argv[1:])\n"
        "        sys.stdout.flush()\n"
        "        os._exit(code)\n"
        "    children.append(child)\n"
        "print([os.waitstatus_to_exitcode(os.waitpid(c, 0)[1]) for c in children])\n"
    )
    arguments = ["generate", "a cat", *SMALL, "--seed", "1", "-o", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        timeout=300,
    )
    assert done.stdout.decode().strip() == "[0, 0, 0, 0]", done.stderr.decode()
    found = {str(path) for path in (tmp_path / "out").iterdir()}
    assert len(found) == 4
    assert {(tmp_path / f"{n}.txt").read_text().splitlines()[-1] for n in range(4)} == found
    assert len({Image.open(path).tobytes() for path in found}) == 1


def test_case_136_any_script_in_paths_and_prompt_under_the_c_locale(
    cli: Callable[..., Any], tmp_path: Path
) -> None:
    from sdx_accel.runtime.checkpoints import load

    name = "модель ü 日本 🙂"
    load("random:sdxl-tiny").save_pretrained(tmp_path / name)
    arguments = ["generate", "кошка 🙂", *SMALL, "--seed", "1", "--model", name, "-o", f"{name} 2"]
    process = start(arguments, tmp_path, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err.decode()
    assert out.decode().splitlines()[-1] == f"{name} 2/кошка-🙂_1.png"
    result = cli(*arguments)
    assert result.code == 0, result.err
    files = sorted((tmp_path / f"{name} 2").iterdir())
    assert [path.name for path in files] == ["кошка-🙂_1-2.png", "кошка-🙂_1.png"]
    pictures = [Image.open(path) for path in files]
    assert pictures[0].tobytes() == pictures[1].tobytes()
    assert {picture.info["parameters"].splitlines()[0] for picture in pictures} == {"кошка 🙂"}
