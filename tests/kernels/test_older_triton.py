"""Triton 3.3, which torch 2.7 comes with: no tensor descriptors, and everything else."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

CODE = """
import sys
import torch
# this Triton's own parts need the module; it is hidden while ours look for it
import triton.runtime.interpreter
hidden = sys.modules["triton.tools.tensor_descriptor"]
sys.modules["triton.tools.tensor_descriptor"] = None
from sdx_kernels import attend, explain, target
from sdx_kernels.ops.group_norm import group_norm
from sdx_kernels._triton import attention_launchers, group_norm
assert not target.has_descriptors()
sys.modules["triton.tools.tensor_descriptor"] = hidden
q = torch.randn(1, 40, 2, 16, dtype=torch.float16)
for op in ("triton", "triton-short", "triton-wide"):
    out, choice = attend(q, q, q, op=op)
    assert choice.name == op
    assert torch.isfinite(out).all()
reasons = explain(q, q, q)
assert "Triton before 3.4 has no tensor descriptors" in reasons["triton-tma"], reasons
g = q.clone().requires_grad_()
attend(g, q, q, op="triton")[0].sum().backward()
assert g.grad is not None
"""


def test_all_but_descriptors_runs_without_their_module() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
