"""The backward kernels' launches for the ahead-of-time check, with all they serve.

It knows their arguments and the ladders; compiling is `aot_compile`'s.
"""

from collections.abc import Iterator
from typing import Any

import torch

from sdx_kernels._triton.aot_compile import TYPES, Launch, key_of, source_of
from sdx_kernels._triton.attention_bwd_launch import KERNEL_OF, constants_for
from sdx_kernels.tuning.attention import AttentionConfig
from sdx_kernels.tuning.attention_bwd import KERNELS, MAX_FP32_DIM, backward_ladder_for

__all__ = ["backward_launch", "backward_launches"]

_BAND = {"left": True, "right": True}

#: what each kind of configuration has to serve: its heaviest members
_MEMBERS: dict[str, tuple[dict[str, Any], ...]] = {
    "plain": ({},),
    "masked": ({**_BAND, "key_mask": True}, {**_BAND, "packed": True}),
    "biased": ({"bias": torch.float32}, {"bias": torch.bool}),
    "combined": ({**_BAND, "key_mask": True, "dropout": True, "bias": torch.float32},),
}


#: each padded width whole, and a head dim of real models that is padded to it
HEAD_DIMS = (40, 64, 80, 128, 160, 256)


def _pointed(
    name: str, dtype: torch.dtype, bias: torch.dtype | None, kernel: str, kind: dict[str, Any]
) -> str:
    """The type behind a pointer; what is not used is given another tensor, as in a launch."""
    if name in ("lse_ptr", "delta_ptr", "tail_ptr"):
        return "fp32"
    if name == "bias_ptr":
        return TYPES[bias or dtype]
    if name == "dbias_ptr":
        return TYPES[bias or dtype] if kernel == "bias" else "fp32"
    if name == "exists_ptr":
        return "u8" if kind.get("key_mask") else TYPES[dtype]
    if name in ("query_starts_ptr", "key_starts_ptr"):
        return "i32" if kind.get("packed") else "fp32"
    if name == "seed_ptr":
        return "i64" if kind.get("dropout") else "fp32"
    return TYPES[dtype]


def backward_launch(
    kernel: str,
    config: AttentionConfig,
    *,
    head_dim: int,
    dtype: torch.dtype,
    member: str = "plain",
    bias: torch.dtype | None = None,
    **kind: Any,
) -> Launch:
    """One launch of one of the kernels, K = Kv."""
    constants = constants_for(
        config,
        head_dim=head_dim,
        value_dim=head_dim,
        dtype=dtype,
        bias=bias,
        bias_sums=kernel == "keys" and bias is not None and bias != torch.bool,
        **kind,
    )
    jit = KERNEL_OF[kernel]
    names = (name for name in jit.arg_names if name.endswith("_ptr"))
    ones = {"bias_stride_n": bias is not None, "exists_stride_n": bool(kind.get("key_mask"))}
    source = source_of(
        jit,
        constants,
        element=TYPES[dtype],
        pointers={name: _pointed(name, dtype, bias, kernel, kind) for name in names},
        floats=("scale", "inverse_keep"),
        ones=[name for name, one in ones.items() if one],
    )
    key = {"kernel": kernel, **key_of(config, head_dim=head_dim, dtype=dtype, member=member)}
    return Launch("backward", key, source, config.num_warps, config.num_stages)


def backward_launches(architecture: int) -> Iterator[Launch]:
    """Every configuration that the architecture may be given, with each of its members."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for head_dim in HEAD_DIMS:
            if dtype == torch.float32 and head_dim > MAX_FP32_DIM:
                continue
            # bfloat16 differs from float16 by a letter; and dims between those that tiles are made
            # for by a mask on the channels, which is dearest in float32
            whole = head_dim in (64, 128, 256) or dtype == torch.float32
            whole = whole and dtype != torch.bfloat16
            for name, members in _MEMBERS.items():
                if name == "plain" or whole:
                    yield from _of_kind(architecture, head_dim, dtype, name, members)


def _of_kind(
    architecture: int,
    head_dim: int,
    dtype: torch.dtype,
    name: str,
    members: tuple[dict[str, Any], ...],
) -> Iterator[Launch]:
    ladder = backward_ladder_for(
        divmod(architecture, 10),
        head_dim,
        head_dim,
        dtype,
        biased=name == "biased",
        masked=name == "masked",
        dropout=name == "combined",
        bias_grad=False,
    )
    if ladder is None:
        return
    with_bias = backward_ladder_for(
        divmod(architecture, 10),
        head_dim,
        head_dim,
        dtype,
        biased=name == "biased",
        dropout=name == "combined",
        bias_grad=True,
    )
    for kernel in KERNELS:
        steps = ladder if kernel != "bias" else with_bias
        for config in () if steps is None else getattr(steps, kernel):
            for kind in members:
                if kernel == "bias" and kind.get("bias") in (None, torch.bool):
                    continue
                yield backward_launch(
                    kernel, config, head_dim=head_dim, dtype=dtype, member=name, **kind
                )
