"""Compiles kernels for GPUs that are not here and reads back what the assembler made of them.

It knows Triton's compiler and ptxas; it must not run anything or ask a device. Triton cannot
compile in a process that interprets, so run it in one without TRITON_INTERPRET:
`python -m sdx_kernels._triton.aot 86 90` prints a JSON line for every launch configuration.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sdx_kernels._triton.attention_fwd import attention_fwd_kernel, constants_for
from sdx_kernels.tuning.attention import (
    MAX_AUTOMATIC_FP32_DIM,
    SHARED_MEMORY,
    AttentionConfig,
    config_for,
)

__all__ = ["CompiledFacts", "attention_facts", "attention_keys", "compile_attention"]

_TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.bool: "u8"}
_TENSOR_CORE = re.compile(r"\b(wgmma\.mma_async|tcgen05\.mma|mma\.sync)")


@dataclass(frozen=True)
class CompiledFacts:
    """What a compiled kernel needs and uses.

    Attributes:
        architecture: e.g. 86 for sm_86.
        tensor_core: the matrix instruction in the PTX, or "" for none.
        shared_bytes: shared memory of one block.
        spill_bytes: register spill stores, bytes a thread, as ptxas reports them.
        registers: registers a thread.
    """

    architecture: int
    tensor_core: str
    shared_bytes: int
    spill_bytes: int
    registers: int


def _ptxas(architecture: int) -> str:
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    newer = folder / "ptxas-blackwell"
    return str(newer if architecture >= 100 and newer.exists() else folder / "ptxas")


def _assemble(ptx: str, architecture: int) -> tuple[int, int]:
    """(spill store bytes, registers) from `ptxas -v`."""
    suffix = re.search(r"^\.target\s+(sm_\w+)", ptx, re.MULTILINE)
    name = suffix.group(1) if suffix else f"sm_{architecture}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [_ptxas(architecture), "-v", f"--gpu-name={name}", str(source)]
        done = subprocess.run(
            [*command, "-o", str(source.with_suffix(".cubin"))],
            capture_output=True,
            text=True,
            check=True,
        )
    spills = re.findall(r"(\d+) bytes spill stores", done.stderr)
    registers = re.findall(r"Used (\d+) registers", done.stderr)
    return max(map(int, spills), default=0), max(map(int, registers), default=0)


def compile_attention(
    architecture: int,
    config: AttentionConfig,
    *,
    head_dim: int,
    dtype: torch.dtype,
    bias: torch.dtype | None = None,
    causal: bool = False,
    with_lse: bool = False,
) -> CompiledFacts:
    """Compiles one launch of the forward kernel, with pointers and strides aligned to 16."""
    constants = constants_for(
        config,
        head_dim=head_dim,
        value_dim=head_dim,
        dtype=dtype,
        bias=bias,
        upper=causal,
        with_lse=with_lse,
    )
    element = _TYPES[dtype]
    signature: dict[str, str] = {}
    aligned: dict[tuple[int, ...], list[list[object]]] = {}
    fixed: dict[str, object] = dict(constants)
    for index, name in enumerate(attention_fwd_kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            pointed = {"bias_ptr": _TYPES[bias or dtype], "lse_ptr": "fp32"}.get(name, element)
            signature[name] = f"*{pointed}"
            aligned[(index,)] = [["tt.divisibility", 16]]
        elif name == "scale":
            signature[name] = "fp32"
        elif name == "bias_stride_n" and bias is not None:
            signature[name], fixed[name] = "constexpr", 1
        else:
            signature[name] = "i32"
            if "_stride_" in name and not name.startswith("bias_stride"):
                aligned[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(attention_fwd_kernel, signature, constexprs=fixed, attrs=aligned)
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", architecture, 32),
        options={
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            "enable_fp_fusion": True,
        },
    )
    ptx = compiled.asm["ptx"]
    found = _TENSOR_CORE.search(ptx)
    spills, registers = _assemble(ptx, architecture)
    return CompiledFacts(
        architecture, found.group(1) if found else "", compiled.metadata.shared, spills, registers
    )


def attention_keys(architecture: int) -> Iterator[tuple[int, torch.dtype, int, bool]]:
    """(head dim, dtype, keys, biased) of every class that automatic dispatch distinguishes."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for head_dim in (40, 64, 80, 128, 160, 256):
            if dtype == torch.float32 and head_dim > MAX_AUTOMATIC_FP32_DIM:
                continue
            for keys in (77, 4096):
                yield from ((head_dim, dtype, keys, biased) for biased in (False, True))


def attention_facts(architecture: int) -> Iterator[dict[str, object]]:
    """Facts of every first configuration: plain and causal, or with a float and a bool bias."""
    limit = SHARED_MEMORY[divmod(architecture, 10)]
    for head_dim, dtype, keys, biased in attention_keys(architecture):
        for causal in (False, True):
            config = config_for(
                divmod(architecture, 10), head_dim, head_dim, dtype, keys, biased, causal
            )
            assert config is not None
            bias = None if not biased else torch.bool if causal else dtype
            facts = compile_attention(
                architecture, config, head_dim=head_dim, dtype=dtype, bias=bias, causal=causal
            )
            yield {
                **asdict(facts),
                "head_dim": head_dim,
                "dtype": str(dtype).removeprefix("torch."),
                "keys": keys,
                "bias": str(bias),
                "causal": causal,
                "config": asdict(config),
                "clean": bool(facts.tensor_core)
                and facts.spill_bytes == 0
                and facts.shared_bytes <= limit,
            }


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        for facts in attention_facts(int(argument)):
            print(json.dumps(facts), flush=True)
