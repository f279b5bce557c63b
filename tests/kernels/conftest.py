"""Fixtures of the kernel tests: the interpreter is on, and a call proves what ran.

Every launch is held against the tuning tables: one that no table has for its inputs fails the test.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from sdx_kernels import attend, count
from sdx_kernels.target import triton_status

from .tables_case import hold_to_tables


@pytest.fixture(scope="session", autouse=True)
def _launches_come_from_tables() -> Iterator[None]:
    if not triton_status()[0]:
        yield
        return
    from sdx_kernels._triton.attention_launch import watch_launches

    watch_launches(hold_to_tables)
    yield
    watch_launches(None)


@pytest.fixture(scope="session")
def interpreter() -> None:
    """Fails, rather than skips, where Triton was loaded too early to be interpreted."""
    language = sys.modules.get("triton.language.standard")
    if language is not None and type(language.sum).__name__ != "InterpretedFunction":
        pytest.fail("Triton was imported before TRITON_INTERPRET=1 was set: set it for the run")


@pytest.fixture
def triton_attend(interpreter: None) -> Iterator[Callable[..., torch.Tensor]]:
    """`attend(op="triton")` that fails unless our kernel really was launched, exactly once.

    Gradients must come from our kernels too: the test fails where the reference made any.
    """
    by_reference = count("reference-backward")

    def triton_call(*args: Any, **kwargs: Any) -> torch.Tensor:
        before = count("triton")
        out, choice = attend(*args, op="triton", **kwargs)
        assert choice.name == "triton"
        assert count("triton") == before + 1
        return out

    yield triton_call
    assert count("reference-backward") == by_reference


@pytest.fixture(params=["triton", "automatic"])
def run(request: pytest.FixtureRequest) -> Callable[..., torch.Tensor]:
    """Each test runs through our kernel (interpreted) and through the automatic choice."""
    if request.param == "triton":
        triton: Callable[..., torch.Tensor] = request.getfixturevalue("triton_attend")
        return triton

    def automatic(*args: Any, **kwargs: Any) -> torch.Tensor:
        return attend(*args, **kwargs)[0]

    return automatic
