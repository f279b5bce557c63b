"""Compiles one launch for a GPU that is not here and reads back what the assembler made of it.

It knows Triton's compiler and ptxas; it must not know any kernel, run anything or ask a device.
Triton cannot compile in a process that interprets, so this works only without TRITON_INTERPRET.
"""

import re
import subprocess
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

__all__ = ["TYPES", "CompiledFacts", "Launch", "compile_launch", "key_of", "source_of"]

#: Triton's names of what pointers point at; bool tensors are read as bytes
TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.bool: "u8"}

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
        descriptor_loads: tensor-descriptor loads (TMA) in the PTX.
    """

    architecture: int
    tensor_core: str
    shared_bytes: int
    spill_bytes: int
    registers: int
    descriptor_loads: int = 0


@dataclass(frozen=True, eq=False)
class Launch:
    """One launch configuration of one kernel with something that it serves.

    Attributes:
        family: the kernels it belongs to.
        key: what it serves and how, for people and for tests.
        source: what Triton compiles.
        num_warps, num_stages: as launched.
        registers: most registers a thread, 0 = no limit.
        tensor_core: whether its products are for tensor cores.
    """

    family: str
    key: Mapping[str, Any]
    source: ASTSource
    num_warps: int
    num_stages: int
    tensor_core: bool = True
    registers: int = 0


def key_of(config: Any, *, head_dim: int, dtype: torch.dtype, member: str) -> dict[str, Any]:
    """A launch's key: what it serves, and rows, keys, warps and stages of its tile."""
    return {
        "head_dim": head_dim,
        "dtype": str(dtype).removeprefix("torch."),
        "member": member,
        "tile": [config.block_m, config.block_n, config.num_warps, config.num_stages],
    }


def source_of(
    kernel: Any,
    constants: Mapping[str, object],
    *,
    pointers: Mapping[str, str],
    element: str,
    floats: Collection[str] = ("scale",),
    ones: Collection[str] = (),
    loose: tuple[str, ...] = ("bias_stride", "exists_stride", "mask_stride"),
) -> ASTSource:
    """A kernel's source with the types of a launch whose pointers and strides are aligned to 16.

    Args:
        kernel: the jit function.
        constants: its compile-time arguments.
        pointers: what each pointer points at, where that is not `element`.
        element: the inputs' type.
        floats: names of fp32 scalars; other scalars are i32.
        ones: strides that are 1, which Triton makes compile-time.
        loose: how the names of strides begin that need not be aligned.
    """
    fixed: dict[str, object] = {**constants, **dict.fromkeys(ones, 1)}
    signature: dict[str, str] = {}
    aligned: dict[tuple[int, ...], list[list[object]]] = {}
    for index, name in enumerate(kernel.arg_names):
        if name in fixed:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = f"*{pointers.get(name, element)}"
            aligned[(index,)] = [["tt.divisibility", 16]]
        elif name in floats:
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if "_stride_" in name and not name.startswith(loose):
                aligned[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constexprs=fixed, attrs=aligned)


def compile_launch(launch: Launch, architecture: int) -> CompiledFacts:
    """Compiles for sm_`architecture`, as every launch does with `enable_fp_fusion`."""
    compiled = triton.compile(
        launch.source,
        target=GPUTarget("cuda", architecture, 32),
        options={
            "num_warps": launch.num_warps,
            "num_stages": launch.num_stages,
            "enable_fp_fusion": True,
            "maxnreg": launch.registers or None,
        },
    )
    ptx = compiled.asm["ptx"]
    found = _TENSOR_CORE.search(ptx)
    spills, registers = _assemble(ptx, architecture)
    return CompiledFacts(
        architecture,
        found.group(1) if found else "",
        compiled.metadata.shared,
        spills,
        registers,
        ptx.count("cp.async.bulk.tensor"),
    )


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
