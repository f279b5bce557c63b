"""Kernels are interpreted on the CPU, and compiled where `-m gpu` asks for the real card.

Triton decides this when it is first imported, and diffusers imports it: so before everything else.
"""

import os
import sys
from collections import Counter
from typing import Any

import pytest

#: What each process that played orders of tests/patches/matrix has handed over.
ORDER_MATRIX = pytest.StashKey[list[dict[str, Any]]]()


def _selects_gpu(arguments: list[str]) -> bool:
    """Whether a `-m EXPRESSION` (or `-mEXPRESSION`) selects the tests marked gpu."""
    for i, argument in enumerate(arguments):
        if argument.startswith("-m"):
            expression = argument[2:] or " ".join(arguments[i + 1 : i + 2])
            return "gpu" in expression.replace("not gpu", "")
    return False


# The interpreter multiplies with numpy's BLAS. OpenBLAS's AVX2 kernels give other last bits for
# a·bᵀ than for (b·aᵀ)ᵀ, where tensor cores give the same; backward computes scores both ways, and
# four fp32 gradients missed their bound by a third. The SSE kernels run on every x86-64 processor.
# Set, not defaulted: some machines export another choice. numpy reads this when it is imported.
os.environ["OPENBLAS_CORETYPE"] = "Nehalem"
# this machine's own order of kernels is no matter of tests
os.environ["SDX_TUNING"] = "off"
if "PYTEST_XDIST_WORKER" not in os.environ:
    # its workers inherit what the first process decided, and do not see the command line
    if not _selects_gpu(sys.argv[1:]):
        os.environ["TRITON_INTERPRET"] = "1"
else:
    # as many processes as cores run beside each other: more threads would only wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")


# The hooks below stand here and not beside the matrix: under `-n` only workers load its conftest.
@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Take over what a worker has counted; one that crashed has left nothing."""
    found = getattr(node, "workeroutput", {}).get("order matrix")
    if found is not None:
        node.config.stash.setdefault(ORDER_MATRIX, []).append(found)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print how many orders were played, added up over all processes, where any were."""
    found = config.stash.get(ORDER_MATRIX, [])
    if not found:
        return
    counts: Counter[str] = Counter()
    for process in found:
        counts.update(process["counts"])
    done = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
    terminalreporter.write_line(
        f"order matrix: {found[0]['pairs']} ordered pairs, {found[0]['combinations']} "
        f"combinations; this run: {done}"
    )
    for name, reason in found[0]["excluded"].items():
        terminalreporter.write_line(f"order matrix: left out: {name}: {reason}")
