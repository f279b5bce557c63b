"""The portable forward kernel's launches for the ahead-of-time check, with all they serve.

It knows the ladders' kinds and each kind's costliest members; compiling is `aot_compile`'s.
"""

from collections.abc import Iterator
from typing import Any

import torch

from sdx_kernels._triton.aot_compile import TYPES, Launch, key_of, source_of
from sdx_kernels._triton.attention_fwd import attention_fwd_kernel, constants_for
from sdx_kernels.tuning.attention import MAX_AUTOMATIC_FP32_DIM, AttentionConfig, ladder_for

__all__ = ["forward_launch", "forward_launches"]

HEAD_DIMS = (40, 64, 80, 128, 160, 256)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_BAND = {"lower": True, "upper": True}

#: name → (what `ladder_for` is asked, what the kernel then serves); the costliest of each kind
MEMBERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "text": ({"keys": 77}, {}),
    "key mask": ({"key_mask": True}, {"key_mask": True}),
    "packed": ({"packed": True}, {"packed": True}),
    "band": ({"band": True}, {**_BAND}),
    "packed band": ({"band": True, "packed": True}, {**_BAND, "packed": True}),
    "bias": ({"biased": True}, {"bias": torch.float32}),
    "bool bias, band": ({"biased": True, "band": True}, {**_BAND, "bias": torch.bool}),
    "dropout": ({"dropout": True}, {"dropout": True}),
    "dropout, bias, band": (
        {"dropout": True, "biased": True, "band": True},
        {**_BAND, "bias": torch.float32, "dropout": True},
    ),
}


def forward_launch(
    config: AttentionConfig,
    *,
    head_dim: int,
    dtype: torch.dtype,
    member: str = "plain",
    with_lse: bool = False,
) -> Launch:
    """One launch of the kernel, K = Kv."""
    serves = {"bias": None, **MEMBERS[member][1]}
    constants = constants_for(
        config,
        head_dim=head_dim,
        value_dim=head_dim,
        dtype=dtype,
        with_lse=with_lse,
        **serves,
    )
    bias = serves["bias"]
    ones = [] if bias is None else ["bias_stride_n"]
    source = source_of(
        attention_fwd_kernel,
        constants,
        element=TYPES[dtype],
        pointers={
            "bias_ptr": TYPES[bias or dtype],
            "lse_ptr": "fp32" if with_lse else TYPES[dtype],
            "exists_ptr": "u8" if serves.get("key_mask") else TYPES[dtype],
            "seed_ptr": "i64" if serves.get("dropout") else TYPES[dtype],
            "query_starts_ptr": "i32" if serves.get("packed") else TYPES[dtype],
            "key_starts_ptr": "i32" if serves.get("packed") else TYPES[dtype],
        },
        floats=("scale", "rescale"),
        ones=[*ones, *(["exists_stride_n"] if serves.get("key_mask") else [])],
    )
    return Launch(
        "forward",
        key_of(config, head_dim=head_dim, dtype=dtype, member=member),
        source,
        config.num_warps,
        config.num_stages,
        tensor_core=constants["PRECISION"] != "ieee" or dtype != torch.float32,
    )


def forward_launches(architecture: int) -> Iterator[Launch]:
    """First configurations of every kind, head-dim class and dtype that dispatch may launch."""
    for dtype in _DTYPES:
        for head_dim in HEAD_DIMS:
            if dtype == torch.float32 and head_dim > MAX_AUTOMATIC_FP32_DIM:
                continue
            for member, (asked, _) in MEMBERS.items():
                # bfloat16 differs from float16 by a letter
                if dtype == torch.bfloat16 and member != "plain":
                    continue
                ladder = ladder_for(
                    divmod(architecture, 10),
                    head_dim,
                    head_dim,
                    dtype,
                    **{"keys": 4096, **asked},
                )
                yield forward_launch(
                    ladder[0], head_dim=head_dim, dtype=dtype, member=member, with_lse=True
                )
