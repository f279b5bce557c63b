"""Launch configurations of the backward attention kernels.

Pure functions of architecture, shape class and dtype: no device is asked and nothing is timed.
"""

from dataclasses import dataclass, replace

import torch

from sdx_kernels.tuning.attention import SHARED_MEMORY, AttentionConfig, padded

__all__ = ["KERNELS", "BackwardLadder", "backward_ladder_for", "backward_shared_bytes"]

#: head dims above this are another kernel's
MAX_HEAD_DIM = 256

#: float32 above this head dim has no configuration without spills: 16 x 16 spills 16 to 28 bytes on
#: sm_120 at 80 and 128
MAX_FP32_DIM = 64

#: the kernels in launch order: row facts; dk and dv; dq; gradient of a tensor bias
KERNELS = ("rows", "keys", "queries", "bias")


@dataclass(frozen=True)
class BackwardLadder:
    """Configurations of each kernel, best first; a refused launch goes on with the next.

    `bias` is empty where its gradient is not wanted.

    `block_m` is always query rows and `block_n` keys, whichever of them the kernel loops over.
    """

    rows: tuple[AttentionConfig, ...]
    keys: tuple[AttentionConfig, ...]
    queries: tuple[AttentionConfig, ...]
    bias: tuple[AttentionConfig, ...]


_CLEAN = (
    "largest of those tried without spills on sm_86, sm_90 and sm_120, ahead of time; not timed"
)
_WHOLE = (
    "128 keys fill 8 warps of 16; 64 queries a step spill 52 bytes on sm_90 and 28 on sm_120, "
    "ahead of time; not timed"
)
_BAND = "32 queries a step spill 40 bytes on sm_86 under a band, ahead of time; not timed"
_SQUARE = "128 x 64 with 8 warps spills 8 bytes on sm_86, ahead of time; not timed"
_NARROW = "64 keys a step spill 68 bytes on sm_86 under a band, ahead of time; not timed"
_ONE_STAGE = "two stages spill 12 bytes on sm_90 and 8 on sm_86, ahead of time; not timed"
_CLEAN_ON_10 = "no spills on sm_100, where the configuration above has some; not timed"
_NARROWEST = "32 keys a step spill 8 bytes on sm_90, ahead of time; not timed"
_LEAST = "the smallest tile: everything at once needs more registers than any larger one has"
_ROWS = "serves all kinds, since few rows are summed again; no spills on sm_86, sm_90 and sm_120"
_BIAS = "serves all kinds: 64 x 64 spills 336 bytes on sm_86 with mask and dropout; not timed"
_FP32 = "three tf32 products a dot hold their parts in registers: larger tiles spill on sm_86"


def _one(m: int, n: int, warps: int, stages: int, source: str) -> tuple[AttentionConfig, ...]:
    return (AttentionConfig(m, n, warps, stages, source),)


#: what the smallest card that is served grants a block (sm_86, 89 and 120); each configuration was
#: compiled for these ahead of time and needs no more there, so that one step a ladder is enough
SMALLEST_SERVED_BYTES = 101376

#: dk and dv, and dq, by (padded head dim, bytes an element, kind). There is none for dk and dv of
#: 256 dims with everything at once: 16 x 16 spills 20 bytes on sm_90.
_KEYS: dict[tuple[int, int, str], tuple[AttentionConfig, ...]] = {
    (64, 2, "plain"): _one(32, 128, 8, 2, _WHOLE),
    (64, 2, "masked"): _one(16, 128, 8, 1, _BAND),
    (64, 2, "biased"): _one(16, 128, 8, 1, _CLEAN),
    (64, 2, "combined"): _one(16, 128, 8, 1, _CLEAN),
    (128, 2, "plain"): _one(32, 64, 8, 1, _CLEAN),
    (128, 2, "masked"): _one(32, 64, 8, 1, _CLEAN),
    (128, 2, "biased"): _one(16, 64, 8, 1, _CLEAN),
    (128, 2, "combined"): _one(16, 16, 8, 1, _LEAST),
    (256, 2, "plain"): _one(32, 32, 8, 1, _CLEAN),
    (256, 2, "masked"): _one(32, 32, 8, 1, _CLEAN),
    (256, 2, "biased"): _one(16, 16, 8, 1, _NARROWEST),
    (64, 4, "plain"): _one(32, 32, 8, 1, _FP32),
    (64, 4, "masked"): _one(32, 16, 4, 1, _FP32),
    (64, 4, "biased"): _one(16, 16, 8, 1, _FP32),
    (64, 4, "combined"): _one(32, 16, 8, 1, _FP32),
}
#: the same for compute capability 10.x, where tcgen05 spills 12 bytes with the configuration above
_KEYS_ON_10: dict[tuple[int, int, str], tuple[AttentionConfig, ...]] = {
    (64, 2, "plain"): _one(16, 128, 8, 1, _CLEAN_ON_10),
    (128, 2, "plain"): _one(32, 32, 8, 1, _CLEAN_ON_10),
    (128, 2, "biased"): _one(16, 32, 8, 1, _CLEAN_ON_10),
}
#: the same for compute capability 8.0, which has more shared memory than 8.6 and no other registers
_KEYS_ON_80: dict[tuple[int, int, str], tuple[AttentionConfig, ...]] = {
    (64, 4, "combined"): _one(
        16, 16, 8, 1, "32 queries a step spill 16 bytes on sm_80 at head dim 40 and 40 at 64"
    ),
}
#: the same for compute capability 9.x and 64 dims: three stages, where two take 1.28 ms for all
#: gradients at 2x10x4096^2 on an H200 and these 0.96, cuDNN 0.50
_ON_9 = "fastest of those tried on an H200, D 64 (docs/kernels/attention.md)"
_KEYS_ON_9 = _one(32, 128, 8, 3, _ON_9)
_QUERIES_ON_9 = _one(64, 64, 4, 3, _ON_9)
#: where head dims do not fill the padded ones: the mask on the channels costs registers
_RAGGED_KEYS: dict[tuple[int, int, str], tuple[AttentionConfig, ...]] = {
    (64, 4, "plain"): _one(32, 16, 8, 1, "32 keys a step spill 8 bytes on sm_90 at head dim 40"),
    (64, 4, "masked"): _one(32, 16, 8, 1, "4 warps spill 4 bytes on sm_86 at head dim 40"),
}
_QUERIES: dict[tuple[int, int, str], tuple[AttentionConfig, ...]] = {
    (64, 2, "plain"): _one(64, 64, 4, 2, _SQUARE),
    (64, 2, "masked"): _one(64, 32, 4, 2, _NARROW),
    (64, 2, "biased"): _one(64, 32, 4, 1, _ONE_STAGE),
    (64, 2, "combined"): _one(32, 32, 4, 1, _CLEAN),
    (128, 2, "plain"): _one(64, 64, 8, 2, _CLEAN),
    (128, 2, "masked"): _one(64, 64, 8, 2, _CLEAN),
    (128, 2, "biased"): _one(64, 32, 8, 1, _ONE_STAGE),
    (128, 2, "combined"): _one(16, 32, 4, 1, _CLEAN),
    (256, 2, "plain"): _one(32, 64, 8, 1, _CLEAN),
    (256, 2, "masked"): _one(32, 32, 8, 1, _CLEAN),
    (256, 2, "biased"): _one(32, 32, 8, 1, _CLEAN),
    (256, 2, "combined"): _one(16, 32, 8, 1, _CLEAN),
    (64, 4, "plain"): _one(16, 32, 4, 1, _FP32),
    (64, 4, "masked"): _one(16, 32, 4, 1, _FP32),
    (64, 4, "biased"): _one(16, 32, 4, 1, _FP32),
    (64, 4, "combined"): _one(16, 16, 4, 1, _FP32),
}
#: the same for dq
_RAGGED_QUERIES: dict[tuple[int, int, str], tuple[AttentionConfig, ...]] = {
    (64, 2, "plain"): _one(64, 64, 8, 2, "4 warps spill 56 bytes on sm_86 at head dim 40"),
    (64, 4, "plain"): _one(16, 32, 8, 1, "4 warps spill 24 bytes on sm_90 at head dim 40"),
}
_ROW_FACTS: dict[tuple[int, int], tuple[AttentionConfig, ...]] = {
    (64, 2): _one(32, 32, 4, 1, _ROWS),
    (128, 2): _one(16, 16, 4, 1, "32 keys a step spill 4 bytes on sm_80; not timed"),
    (256, 2): _one(16, 16, 4, 1, "32 keys a step spill 4 to 8 bytes on sm_86; not timed"),
    (64, 4): _one(16, 32, 4, 1, _FP32),
}
_BIAS_GRAD: dict[tuple[int, int], tuple[AttentionConfig, ...]] = {
    (64, 2): _one(32, 32, 4, 1, _BIAS),
    (128, 2): _one(16, 32, 4, 1, _BIAS),
    (256, 2): _one(16, 32, 8, 1, "4 warps spill 28 bytes on sm_86, ahead of time; not timed"),
    (64, 4): _one(16, 32, 8, 1, _FP32),
}


def backward_shared_bytes(
    kernel: str, config: AttentionConfig, head_dim: int, value_dim: int, itemsize: int
) -> int:
    """Shared memory a launch needs at most.

    The tiles that a program owns and `num_stages` times those it loops over, and a second layout of
    one of each.
    """
    own, looped = config.block_m, config.block_n
    if kernel == "keys":
        own, looped = looped, own
    width, value_width = padded(head_dim), padded(value_dim)
    tiles = (own + config.num_stages * looped) * (width + value_width)
    again = (own + looped) * max(width, value_width)
    return itemsize * (tiles + again)


def backward_ladder_for(
    capability: tuple[int, int],
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    *,
    biased: bool = False,
    masked: bool = False,
    dropout: bool = False,
    bias_grad: bool = False,
    shared_memory_bytes: int | None = None,
) -> BackwardLadder | None:
    """Configurations that fit; None where a kernel has none: such inputs are not for these kernels.

    Args:
        capability: compute capability, e.g. (8, 6).
        head_dim: K. value_dim: Kv.
        dtype: of query, key and value.
        biased: whether a dense bias is read.
        masked: whether there is a band, a key mask or packed sequences.
        dropout: whether weights are dropped.
        bias_grad: whether the bias's gradient is wanted.
        shared_memory_bytes: the card's limit per block; default: the architecture's.
    """
    width = max(head_dim, value_dim)
    limit = MAX_FP32_DIM if dtype == torch.float32 else MAX_HEAD_DIM
    if width > limit or min(head_dim, value_dim) < 1:
        return None
    if shared_memory_bytes is None:
        shared_memory_bytes = SHARED_MEMORY.get(capability, 49152)
    # the estimate is an upper bound, and known to be above what a card of that size needs
    granted = 1 << 31 if shared_memory_bytes >= SMALLEST_SERVED_BYTES else 0
    size = max(64, padded(width)), dtype.itemsize
    kind = "biased" if biased else "masked" if masked else "plain"
    if dropout or (biased and masked):
        kind = "combined"
    keys = _KEYS.get((*size, kind), ())
    if capability[0] == 10:
        keys = _KEYS_ON_10.get((*size, kind), keys)
    if capability == (8, 0):
        keys = _KEYS_ON_80.get((*size, kind), keys)
    queries = _QUERIES.get((*size, kind), ())
    if not head_dim == value_dim == size[0]:
        keys = _RAGGED_KEYS.get((*size, kind), keys)
        queries = _RAGGED_QUERIES.get((*size, kind), queries)
    elif capability[0] == 9 and (*size, kind) == (64, 2, "plain"):
        keys, queries = _KEYS_ON_9, _QUERIES_ON_9
    # float32 with a band, a key mask and dropout: 16 x 32 spills 52 bytes on sm_90
    spills = dtype == torch.float32 and kind == "combined"
    bias = _BIAS_GRAD.get(size, ()) if bias_grad and not spills else ()
    all_steps = {
        "rows": _ROW_FACTS[size],
        "keys": keys,
        "queries": queries,
        "bias": bias,
    }
    steps = {
        kernel: tuple(
            config
            for config in all_steps[kernel]
            if backward_shared_bytes(kernel, config, head_dim, value_dim, dtype.itemsize)
            <= max(shared_memory_bytes, granted)
        )
        for kernel in KERNELS
    }
    needed = KERNELS if bias_grad else KERNELS[:3]
    return BackwardLadder(**steps) if all(steps[kernel] for kernel in needed) else None


#: (keys' kernel, queries' kernel) that a benchmark tries beside the ladder on compute capability
#: 9.0 at head dim 64 in 16 bits: none spills there
_TRIED = (
    ((64, 128, 8, 1), (128, 64, 8, 3)),
    ((64, 128, 8, 1), (128, 128, 8, 2)),
    ((64, 128, 8, 1), (128, 64, 4, 2)),
    ((32, 128, 8, 3), (128, 64, 8, 3)),
)


def candidates(
    capability: tuple[int, int], head_dim: int, value_dim: int, dtype: torch.dtype
) -> dict[str, BackwardLadder]:
    """Ladders beyond the shipped one that a benchmark may try, by name; unmasked only."""
    shipped = backward_ladder_for(capability, head_dim, value_dim, dtype)
    square = head_dim == value_dim == 64 and dtype.itemsize == 2
    if shipped is None or capability[0] != 9 or not square:
        return {}
    return {
        f"keys-{'x'.join(map(str, keys))}-queries-{'x'.join(map(str, queries))}": replace(
            shipped,
            keys=_one(*keys, "candidate, not timed yet"),
            queries=_one(*queries, "candidate, not timed yet"),
        )
        for keys, queries in _TRIED
    }
