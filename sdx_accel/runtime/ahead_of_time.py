"""Compiles the kernels for cards that are not here, in processes of their own, and counts.

Triton can compile only where it does not interpret, which a running process cannot change.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from sdx_accel.errors import WorkError

__all__ = ["ARCHITECTURES", "compiled"]

#: compute capabilities without the dot; older cards get torch's kernels
ARCHITECTURES = (80, 86, 89, 90, 100, 120)


def compiled(architecture: int, *, everything: bool) -> Iterator[dict[str, Any]]:
    """Facts of each launch configuration on an architecture, as they are compiled.

    Args:
        architecture: e.g. 86 for sm_86.
        everything: every configuration, not only the first of each family of kernels.

    Yields:
        `family`, what it serves, `tensor_core`, `shared_bytes`, `spill_bytes`, `registers` and
        `clean`.

    Raises:
        WorkError: the compiler failed; the message ends with what it said.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "sdx_kernels._triton.aot", str(architecture)]
    with subprocess.Popen(
        [*command, *([] if everything else ["--first"])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            yield json.loads(line)
        said = process.stderr.read().strip()
    if process.returncode != 0:
        last = said.splitlines()[-1] if said else f"exit code {process.returncode}"
        raise WorkError(f"compiling for sm_{architecture} failed: {last}")
