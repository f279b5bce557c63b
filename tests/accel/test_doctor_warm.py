"""What `doctor` says the registry picks, and `--warm`, which compiles it ahead."""

import pytest
import torch

from sdx_accel.runtime import warm
from sdx_accel.runtime.warm import SHAPES, AttentionShape, warm_kernels, what_runs
from sdx_kernels import target
from sdx_kernels.registry import launches


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_a_card_that_is_not_here_gets_the_registry_s_answer(capability: tuple[int, int]) -> None:
    assert what_runs(capability).startswith("attention by ")


def test_a_turing_card_gets_torch_s_kernels_and_the_reason() -> None:
    said = what_runs((7, 5))
    assert said.startswith("attention by torch's SDPA")
    assert "(7, 5)" in said
    assert "Triton kernel" not in said


def test_a_cpu_has_nothing_to_warm() -> None:
    assert warm_kernels("cpu").endswith("nothing to warm")


def test_the_inputs_are_those_of_the_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    small = (
        AttentionShape("plain", 8, 5, 2, 16),
        AttentionShape("masked", 8, 5, 2, 16, "bias"),
        AttentionShape("triangle", 8, 8, 2, 16, "causal"),
    )
    monkeypatch.setattr(warm, "SHAPES", small)
    plain, masked, triangle = warm._inputs(torch.device("cpu"))
    assert plain[0].shape == (1, 8, 2, 16)
    assert plain[1].shape == (1, 5, 2, 16)
    assert plain[2] is None
    assert masked[2].shape == (1, 1, 1, 5)
    assert type(triangle[2]).__name__ == "LowerTriangularMask"


@pytest.mark.gpu
@pytest.mark.slow
def test_warming_runs_every_shape_on_the_card() -> None:
    before = sum(launches.values())
    said = warm_kernels()
    dtypes = 2 if (target.of(torch.device("cuda")).capability or (0, 0)) >= (8, 0) else 1
    assert sum(launches.values()) - before == dtypes * len(SHAPES)
    assert said.startswith("ready in ")
