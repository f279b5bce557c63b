"""The order in which implementations of unmasked attention are tried, by measured times.

Pure functions of architecture, shape class and dtype: no device is asked and nothing is timed.
"""

from dataclasses import dataclass

import torch

from sdx_kernels.checks import Signature

__all__ = ["Preference", "preference"]

_HALF = (torch.float16, torch.bfloat16)
_ALL = (*_HALF, torch.float32, torch.float64)
_ANY = (0, 1 << 62)


@dataclass(frozen=True)
class Preference:
    """Where one implementation is known to be the faster one; bounds are inclusive.

    Attributes:
        name: the implementation.
        source: what was timed, for people.
        capabilities: major compute capabilities; () = all.
        head_dims: of the wider of K and Kv. queries, keys: lengths.
        dtypes: of the inputs.
        grad: whether it holds where gradients are wanted too.
    """

    name: str
    source: str
    capabilities: tuple[int, ...] = ()
    head_dims: tuple[int, int] = _ANY
    queries: tuple[int, int] = _ANY
    keys: tuple[int, int] = _ANY
    dtypes: tuple[torch.dtype, ...] = _ALL
    grad: bool = True

    def holds(self, s: Signature) -> bool:
        """Whether the signature is in this entry's range."""
        major = s.target.capability[0] if s.target.capability else -1
        return (
            (not self.capabilities or major in self.capabilities)
            and self.head_dims[0] <= max(s.head_dim, s.value_dim) <= self.head_dims[1]
            and self.queries[0] <= s.queries <= self.queries[1]
            and self.keys[0] <= s.keys <= self.keys[1]
            and s.dtype in self.dtypes
            and (self.grad or not s.grad)
        )


#: first match wins; figures are graph replays of docs/benchmarks/attention.md
_PREFERENCES: tuple[Preference, ...] = (
    Preference(
        "triton-short",
        "a program holds all keys: H200, fp16, D 64, 0.0079 ms against cuDNN's 0.0124 at 1,024 "
        "queries of 77 keys, 0.0126 against 0.0173 at 4,096, 0.116 against 0.70 at 16 of 16; "
        "gradients are faster through torch",
        capabilities=(9,),
        head_dims=(1, 64),
        keys=(1, 96),
        dtypes=_HALF,
        grad=False,
    ),
    Preference(
        "triton-tma",
        "whatever the scores: H200, bf16, D 64, 0.0321 ms against cuDNN's 0.0357 at 2x20x1024^2, "
        "0.177 against 0.189 at 2x10x4096^2, 2.59 against 2.95 at 16384^2",
        capabilities=(9,),
        head_dims=(64, 64),
        queries=(1024, 1 << 62),
        keys=(1024, 1 << 62),
        dtypes=(torch.bfloat16,),
        grad=False,
    ),
    Preference(
        "triton-tma",
        "H200, bf16, D 40, 0.145 ms against cuDNN's 0.153 at 2x8x4096^2",
        capabilities=(9,),
        head_dims=(40, 40),
        queries=(4096, 1 << 62),
        keys=(4096, 1 << 62),
        dtypes=(torch.bfloat16,),
        grad=False,
    ),
    Preference(
        "triton-wide",
        "torch has only its memory-efficient kernel here: H200, fp16, D 512, 16,384 tokens, 2.28 "
        "against 3.98 ms, gradients 8.6 against 57.9 ms",
        capabilities=(9,),
        head_dims=(257, 512),
        queries=(4096, 1 << 62),
        keys=(4096, 1 << 62),
        dtypes=_HALF,
    ),
    Preference(
        "sdpa",
        "torch's kernel (cuDNN) is as fast or faster whatever the scores: H200, fp16, 0.189 ms at "
        "2x10x4096^2 D 64, where ours takes 0.177 with flat scores and 0.205 to 0.4 with peaked "
        "ones; 0.020 against 0.022 ms at D 80, 0.011 against 0.017 at D 160, 0.42 against 0.49 at "
        "D 128",
        capabilities=(9,),
        dtypes=_HALF,
    ),
    Preference("sdpa", "not timed on this architecture yet, so torch's own kernel is kept"),
)


def preference(signature: Signature) -> tuple[tuple[str, ...], str]:
    """Names to try first for unmasked attention, and why; ((), "") = by priority.

    Masked attention goes by priority: torch has no kernel that reads a mask by strides and gives
    0 for rows with nothing to attend on every backend.
    """
    s = signature
    if s.target.kind != "cuda" or s.bias != "none" or s.structure:
        return (), ""
    for entry in _PREFERENCES:
        if entry.holds(s):
            return (entry.name,), entry.source
    return (), ""
