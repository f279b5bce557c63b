"""What importing sdx_accel does to diffusers, in fresh processes."""

import inspect
import subprocess
import sys
from typing import Any

import pytest


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


_PRINT_NEW = """
from diffusers.pipelines.pipeline_utils import DiffusionPipeline as P
from diffusers.models.modeling_utils import ModelMixin as M
print(sorted(set(vars(P)) - before[0]), sorted(set(vars(M)) - before[1]))
"""
_BEFORE = """
from diffusers.pipelines.pipeline_utils import DiffusionPipeline as P
from diffusers.models.modeling_utils import ModelMixin as M
before = set(vars(P)), set(vars(M))
"""
_THREE = "['disable_xattn', 'enable_xattn', 'xattn_report']"


def test_exactly_three_methods_when_diffusers_is_there_already():
    assert _python(_BEFORE + "import sdx_accel" + _PRINT_NEW) == f"{_THREE} {_THREE}"


def test_the_same_when_diffusers_comes_later():
    first = _python(
        "import sdx_accel\nfrom diffusers import DiffusionPipeline, ModelMixin\n"
        "print([n for n in vars(DiffusionPipeline) if 'xattn' in n],"
        " [n for n in vars(ModelMixin) if 'xattn' in n])"
    )
    assert first.count("enable_xattn") == 2
    assert first.count("disable_xattn") == 2
    assert first.count("xattn_report") == 2


def test_a_taken_name_is_left_alone_with_one_warning():
    out = _python(
        "import warnings\n"
        "from diffusers.pipelines.pipeline_utils import DiffusionPipeline as P\n"
        "P.enable_xattn = mine = lambda self: 'mine'\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        "    import sdx_accel\n"
        "ours = [w for w in seen if 'sdx_accel' in str(w.message)]\n"
        "print(P.enable_xattn is mine, hasattr(P, 'xattn_report'), len(ours))"
    )
    assert out == "True False 1"


def test_help_shows_the_arguments():
    from diffusers import DiffusionPipeline

    import sdx_accel  # noqa: F401  (attaches the methods)

    arguments = inspect.signature(DiffusionPipeline.enable_xattn).parameters
    assert {"attention_op", "vram", "device", "quality", "fused"} <= set(arguments)


_DEFAULT = (
    "from diffusers import FluxTransformer2DModel\n"
    "from diffusers.models.attention_dispatch import _AttentionBackendRegistry as R\n"
    "from diffusers.utils import constants\n"
    "print(R._active_backend.value, constants.DIFFUSERS_ATTN_BACKEND)"
)


def slow(*values: str | None) -> Any:
    """A row of the next test that takes a process of its own, 5 s on a slow machine."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("first", "asked", "runs"),
    [
        ("import sdx_accel", "sdx_accel", "sdx_accel sdx_accel"),
        # diffusers loads its dispatcher with the first model, not before
        slow("import diffusers, sdx_accel", "sdx_accel", "sdx_accel sdx_accel"),
        slow("import sdx_accel", "_native_math", "_native_math _native_math"),
        slow("import sdx_accel", None, "native native"),
    ],
)
def test_diffusers_variable_may_name_our_backend(
    monkeypatch: pytest.MonkeyPatch, first: str, asked: str | None, runs: str
) -> None:
    monkeypatch.delenv("DIFFUSERS_ATTN_BACKEND", raising=False)
    if asked is not None:
        monkeypatch.setenv("DIFFUSERS_ATTN_BACKEND", asked)
    assert _python(f"{first}\n{_DEFAULT}") == runs
