"""Why an implementation refuses a signature, in the words that several of them share.

It knows devices, dtypes and shapes; it must not know any kernel.
"""

import torch

from sdx_kernels import target
from sdx_kernels.checks import Signature

__all__ = [
    "DTYPES",
    "HALF",
    "OLDEST",
    "age_reason",
    "descriptor_reasons",
    "dtype_reason",
    "triton_reasons",
]

TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
DTYPES = (*TRITON_DTYPES, torch.float64)
HALF = (torch.float16, torch.bfloat16)

#: Triton ≥ 3.3 has no tensor-core path below sm_80: its dots fall back to FMA there
OLDEST = (8, 0)


def dtype_reason(what: str, dtype: torch.dtype, supported: tuple[torch.dtype, ...]) -> list[str]:
    """Why a dtype is refused; empty when it is supported."""
    if dtype in supported:
        return []
    names = ", ".join(sorted(str(entry) for entry in supported))
    return [f"{what}={dtype} (supported: {{{names}}})"]


def age_reason(s: Signature, oldest: tuple[int, int] = OLDEST) -> list[str]:
    """Why an NVIDIA card is too old; empty when it is not."""
    capability = s.target.capability
    if capability is None or capability >= oldest:
        return []
    return [
        f"requires device with capability >= {oldest} but your GPU has capability {capability} "
        f"(too old)"
    ]


def triton_reasons(
    s: Signature,
    dtypes: tuple[torch.dtype, ...] = TRITON_DTYPES,
    oldest: tuple[int, int] = OLDEST,
) -> list[str]:
    """What every kernel of ours refuses: devices, dtypes, foreign structures, empty inputs."""
    reasons = []
    interpreted = s.explicit and s.interpreting and s.target.kind == "cpu"
    if s.target.kind != "cuda" and not interpreted:
        reasons.append(f"device={s.target.kind} (supported: {{'cuda'}})")
    if s.interpreting and not s.explicit:
        reasons.append("TRITON_INTERPRET is set, and the interpreter runs only for op='triton'")
    if not target.triton_status()[0]:
        reasons.append(str(target.triton_status()[1]))
    reasons += age_reason(s, oldest)
    reasons += dtype_reason("dtype", s.dtype, dtypes)
    reasons += dtype_reason("output_dtype", s.output_dtype, TRITON_DTYPES)
    if s.bias_dtype is not None:
        reasons += dtype_reason("attn_bias.dtype", s.bias_dtype, (torch.bool, *DTYPES))
    if s.interpreting and s.dtype == torch.bfloat16:
        reasons.append("Triton's interpreter multiplies bfloat16 bit patterns, not values")
    if s.foreign:
        reasons.append(f"attn_bias type is {s.structure}, not one of sdx_kernels'")
    if s.empty:
        reasons.append("an input has a dimension of size 0")
    # the smallest tile has 16 rows
    if s.batch * s.heads * -(-s.queries // 16) > 2**31 - 1:
        reasons.append("batch x heads x query tiles > 2**31 - 1")
    return reasons


def descriptor_reasons() -> list[str]:
    """Why kernels through tensor descriptors are refused by the Triton that is installed."""
    # a Triton that cannot be imported is another reason, and asking it more would raise again
    absent = target.triton_status()[0] and not target.has_descriptors()
    return ["Triton before 3.4 has no tensor descriptors"] if absent else []
