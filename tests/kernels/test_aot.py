"""The kernel compiled for GPUs that are not here: tensor cores, no spills, shared memory."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

ONE = """
import json
from dataclasses import asdict
import torch
from sdx_kernels._triton.aot import compile_attention
from sdx_kernels.tuning.attention import SHARED_MEMORY, config_for
for architecture in ({architectures}):
    capability = divmod(architecture, 10)
    config = config_for(capability, 64, 64, torch.float16, 4096)
    facts = compile_attention(architecture, config, head_dim=64, dtype=torch.float16)
    print(json.dumps(asdict(facts) | {{"limit": SHARED_MEMORY[capability]}}))
"""


def python(*arguments: str) -> list[dict[str, object]]:
    """Lines of JSON from a process that does not interpret, where Triton can compile."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_sdxls_self_attention_compiles_for_cards_that_are_not_here() -> None:
    facts = python("-c", ONE.format(architectures="86, 90"))
    assert [fact["architecture"] for fact in facts] == [86, 90]
    assert [fact["tensor_core"] for fact in facts] == ["mma.sync", "wgmma.mma_async"]
    for fact in facts:
        assert fact["spill_bytes"] == 0
        assert int(str(fact["shared_bytes"])) <= int(str(fact["limit"]))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 86, 89, 90, 100, 120])
def test_every_configuration_of_dispatch_is_clean(architecture: int) -> None:
    facts = python("-m", "sdx_kernels._triton.aot", str(architecture))
    assert len(facts) > 40
    assert [fact for fact in facts if not fact["clean"]] == []
