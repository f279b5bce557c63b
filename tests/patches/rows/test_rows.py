"""Every row of the compatibility table that can be built here, end to end against stock."""

import importlib.util
from collections import Counter
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
import transformers

import sdx_patches
from sdx_kernels.registry import launches

from . import (
    added_text_case,
    controlnet_case,
    ip_adapter_case,
    others_case,
    sd_case,
    sdxl_case,
    transformers_case,
    video_case,
)
from .check_case import (
    TOLERANCE,
    broken_op,
    difference,
    is_served,
    measure,
    recorded,
    replay,
    run,
    state,
)
from .parts_case import Row, attentions

ROWS: list[Row] = [
    *sdxl_case.ROWS,
    *sd_case.ROWS,
    *controlnet_case.ROWS,
    *ip_adapter_case.ROWS,
    *video_case.ROWS,
    *added_text_case.ROWS,
    *transformers_case.ROWS,
    *others_case.ROWS,
]


def named(rows: list[Row]) -> list[Any]:
    return [pytest.param(row, id=row.name.replace(" ", "-")) for row in rows]


@pytest.mark.parametrize("row", named(ROWS))
@pytest.mark.filterwarnings("ignore:In CPU autocast")  # the depth pipeline's own, in fp32
def test_a_row_equals_stock_by_our_op_and_is_given_back(
    row: Row, record_property: Callable[[str, object], None]
) -> None:
    root = row.build()
    stock = run(row, root)
    # only now: transformers hooks an encoder for good when its hidden states are first asked for
    before = state(root)

    sdx_patches.patch(root, owner="row")
    ours = measure(row, root)
    assert difference(ours.outputs, stock) <= TOLERANCE

    # every attention layer is in the report, and those that ran say by what
    assert {path for path, _ in attentions(root)} <= {layer.path for layer in ours.layers}
    assert len(ours.patched) >= row.patched
    assert all(layer.reason for layer in ours.layers if not layer.patched)
    record_property("patched", f"{len(ours.patched)} of {len(ours.layers)} layers")
    running = {layer.path: layer.running for layer in ours.patched}
    assert calls_without_record(ours.calls, running) == []
    recorded_names = {running[path] for path in ours.calls}
    if row.once:
        assert ours.ran.total() == ours.calls.total()
        assert set(ours.ran) == recorded_names
    else:
        assert ours.ran.total() >= ours.calls.total()
        assert set(ours.ran) >= recorded_names

    if ours.patched:
        with broken_op():
            assert difference(run(row, root), stock) > TOLERANCE, "a broken op would not be seen"

    sdx_patches.restore(root, owner="row")
    assert state(root) == before
    assert difference(run(row, root), stock) == 0.0


def calls_without_record(calls: Counter[str], running: dict[str, str]) -> list[str]:
    return [path for path in calls if running.get(path, "not run yet") == "not run yet"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "row", named([row for row in ROWS if row.name in ("sd", "sdxl", "flux transformer")])
)
def test_our_kernel_itself_serves_every_call(row: Row) -> None:
    root = row.build()
    stock = run(row, root)
    sdx_patches.patch(root, owner="row", attention_op="triton")
    ours = measure(row, root)
    assert difference(ours.outputs, stock) <= TOLERANCE
    assert ours.ran == {"triton": ours.calls.total()}
    assert ours.calls.total() > 0


def errors_in_16_bits(row: Row, device: str) -> tuple[float, float]:
    """Largest error of the row's models in fp16 against fp32, stock and ours.

    The fp32 run's calls are repeated, so that all three compute from the same inputs: a pipeline
    in fp16 would draw other noise.
    """
    root = row.build()
    calls = recorded(row, root)
    exact = replay(root, calls, device, torch.float32)
    stock = replay(root, calls, device, torch.float16)
    launched = launches.total()
    sdx_patches.patch(root, owner="row")
    ours = replay(root, calls, device, torch.float16)
    served = [m for path, m in attentions(root) if path.startswith(row.parts) and is_served(m)]
    assert launches.total() - launched >= len(served)
    sdx_patches.restore(root, owner="row")
    return difference(stock, exact), difference(ours, exact)


@pytest.mark.gpu
@pytest.mark.parametrize("row", named([row for row in ROWS if row.parts]))
@pytest.mark.filterwarnings("ignore:In CPU autocast")  # the depth pipeline's own, in fp32
def test_in_16_bits_a_row_errs_no_more_than_stock(
    row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    stock, ours = errors_in_16_bits(row, "cuda")
    assert ours <= 2 * stock + 1e-3


#: Parts that a row has something else in place of, what building them does, and why it fails.
STAND_INS = {
    "kolors": (
        lambda: diffusers.pipelines.kolors.ChatGLMTokenizer(vocab_file=""),
        AssertionError,
        "the tokenizer reads a vocabulary that has to be downloaded",
    ),
    "dreamlite": (
        lambda: transformers.Qwen3VLVideoProcessor(),
        ImportError,
        "the text encoder's processor needs torchvision",
    ),
}


@pytest.mark.parametrize("name", list(STAND_INS))
def test_a_stand_in_is_still_needed(name: str) -> None:
    make, error, reason = STAND_INS[name]
    if "torchvision" in reason and importlib.util.find_spec("torchvision"):
        pytest.skip("torchvision is here: the row can take its own processor")
    with pytest.raises(error):
        make()
    assert name in {row.name for row in ROWS}


def test_every_row_of_the_table_is_here_once() -> None:
    assert {row.number for row in ROWS} == set(range(1, 29))
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
