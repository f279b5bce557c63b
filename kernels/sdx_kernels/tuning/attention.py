"""Launch configurations of the portable attention kernel.

Pure functions of architecture, shape class and dtype: no device is asked and nothing is timed.
"""

from dataclasses import dataclass

import torch

__all__ = ["AttentionConfig", "config_for", "ladder_for", "shared_bytes"]

#: head dims above this have no kernel of ours yet
MAX_HEAD_DIM = 256

#: float32 above this head dim spills, so that only a caller who names our kernel gets it
MAX_AUTOMATIC_FP32_DIM = 128

#: shared memory a block may opt in to, bytes, by compute capability (CUDA C Programming Guide,
#: technical specifications per compute capability)
SHARED_MEMORY = {
    (7, 5): 65536,
    (8, 0): 166912,
    (8, 6): 101376,
    (8, 7): 166912,
    (8, 9): 101376,
    (9, 0): 232448,
    (10, 0): 232448,
    (10, 3): 232448,
    (12, 0): 101376,
    (12, 1): 101376,
}


@dataclass(frozen=True)
class AttentionConfig:
    """One launch: query rows and keys a tile, warps, pipeline stages, and where they came from."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    source: str


_CLEAN = "no spill when compiled ahead of time; not timed yet"
_NARROW = "smaller step, for cards with less shared memory"
_WIDE_FP32 = "plain fp32 products, no tensor cores, spills: only when asked for by name"

_WIDTHS = (64, 96, 128, 160, 256)

_Ladder = tuple[AttentionConfig, ...]

_TWO_BYTES_NARROW = AttentionConfig(32, 32, 4, 1, _NARROW)
_SMALLEST = AttentionConfig(16, 16, 4, 1, _NARROW)
_FP32_NARROW = AttentionConfig(16, 32, 4, 1, _CLEAN)
_DROPPED = (
    "; with dropout, a bool bias, a band and a key mask at once 24 to 32 bytes spill on sm_120"
)
_FP32_ANY = AttentionConfig(16, 16, 4, 1, _WIDE_FP32)

#: by (width that the wider head dim is computed in, bytes an element, kind): largest first. A
#: launch takes the first one that the card's shared memory holds. Tests of keys cost registers:
#: with both bounds of a band, 128 x 64 spills 60 bytes a thread on sm_120 at width 64, 128 x 32
#: 4 bytes at 96 and 40 at 128, and 64 x 32 spills 12 at 160 where it does not at 256 (one product
#: instead of two). A bool bias beside a band is the costliest: 128 x 32 then spills 104 on sm_120
#: at 64, 64 x 16 spills 28 at 160, and 12 on sm_90 at 256; with dropout 64 x 32 spills 8 at 128.
_LADDERS: dict[tuple[int, int, str], _Ladder] = {
    (64, 2, "plain"): (
        AttentionConfig(128, 64, 8, 3, _CLEAN),
        AttentionConfig(64, 64, 4, 2, _NARROW),
        _TWO_BYTES_NARROW,
    ),
    (64, 2, "banded"): (AttentionConfig(128, 32, 8, 3, _CLEAN), _TWO_BYTES_NARROW),
    (64, 2, "biased"): (AttentionConfig(64, 32, 8, 2, _CLEAN), _TWO_BYTES_NARROW),
    (64, 2, "dropout"): (AttentionConfig(64, 32, 8, 2, _CLEAN), _TWO_BYTES_NARROW),
    (96, 2, "plain"): (
        AttentionConfig(128, 64, 8, 2, _CLEAN),
        AttentionConfig(64, 32, 8, 2, _NARROW),
        _TWO_BYTES_NARROW,
    ),
    (96, 2, "banded"): (AttentionConfig(64, 32, 8, 2, _CLEAN), _TWO_BYTES_NARROW),
    (96, 2, "biased"): (AttentionConfig(64, 32, 8, 2, _CLEAN), _TWO_BYTES_NARROW),
    (96, 2, "dropout"): (AttentionConfig(64, 32, 8, 2, _CLEAN), _TWO_BYTES_NARROW),
    (128, 2, "plain"): (
        AttentionConfig(128, 64, 8, 2, _CLEAN),
        AttentionConfig(64, 32, 8, 2, _NARROW),
        _TWO_BYTES_NARROW,
    ),
    (128, 2, "banded"): (AttentionConfig(64, 32, 8, 2, _CLEAN), _TWO_BYTES_NARROW),
    (128, 2, "biased"): (AttentionConfig(64, 32, 8, 2, _CLEAN), _TWO_BYTES_NARROW),
    (128, 2, "dropout"): (AttentionConfig(32, 32, 8, 2, _CLEAN), _TWO_BYTES_NARROW),
    (160, 2, "plain"): (AttentionConfig(64, 32, 8, 2, _CLEAN), _SMALLEST),
    (160, 2, "banded"): (AttentionConfig(64, 16, 8, 1, _CLEAN), _SMALLEST),
    (160, 2, "biased"): (AttentionConfig(32, 16, 8, 1, _CLEAN), _SMALLEST),
    (160, 2, "dropout"): (AttentionConfig(64, 16, 8, 1, _CLEAN), _SMALLEST),
    (256, 2, "plain"): (AttentionConfig(64, 32, 8, 2, _CLEAN), _SMALLEST),
    (256, 2, "banded"): (AttentionConfig(64, 32, 8, 2, _CLEAN), _SMALLEST),
    (256, 2, "biased"): (AttentionConfig(32, 16, 8, 1, _CLEAN), _SMALLEST),
    (256, 2, "dropout"): (AttentionConfig(32, 16, 8, 1, _CLEAN), _SMALLEST),
    (64, 4, "plain"): (AttentionConfig(32, 32, 8, 2, _CLEAN), _SMALLEST),
    (64, 4, "banded"): (AttentionConfig(32, 32, 8, 2, _CLEAN), _SMALLEST),
    (64, 4, "biased"): (
        AttentionConfig(32, 32, 8, 1, "2 stages spill 4 bytes on sm_86 and sm_90 at head dim 40"),
        _SMALLEST,
    ),
    (64, 4, "dropout"): (AttentionConfig(32, 32, 8, 2, _CLEAN + _DROPPED), _SMALLEST),
    (128, 4, "plain"): (_FP32_NARROW,),
    (128, 4, "banded"): (_FP32_NARROW,),
    (128, 4, "biased"): (_FP32_NARROW,),
    (128, 4, "dropout"): (AttentionConfig(16, 32, 4, 1, _CLEAN + _DROPPED),),
    (256, 4, "plain"): (_FP32_ANY,),
    (256, 4, "banded"): (_FP32_ANY,),
    (256, 4, "biased"): (_FP32_ANY,),
    (256, 4, "dropout"): (_FP32_ANY,),
}

_WARPGROUPS = (
    "Triton 3.6 makes wrong code of 64 x 16 with 8 warps for sm_90 (an H200 gave wrong rows and "
    "illegal addresses at head dim 160); 64 x 32 is right and does not spill there"
)
_TWO_WARPGROUPS = (AttentionConfig(64, 32, 8, 2, _WARPGROUPS), _SMALLEST)

#: where an architecture (major capability) needs another ladder
_OVERRIDES: dict[tuple[int, int, int, str], _Ladder] = {
    (10, 64, 2, "plain"): (
        AttentionConfig(128, 64, 4, 2, "8 warps spill 4 bytes at 3 stages, 12 at 2, on sm_100"),
        AttentionConfig(64, 64, 4, 2, _NARROW),
        _TWO_BYTES_NARROW,
    ),
    (9, 160, 2, "banded"): _TWO_WARPGROUPS,
    (9, 160, 2, "dropout"): _TWO_WARPGROUPS,
    (10, 96, 2, "biased"): (
        AttentionConfig(64, 32, 8, 1, "2 stages spill 12 bytes on sm_100 at head dim 80"),
        _TWO_BYTES_NARROW,
    ),
}

#: the same for compute capability 8.0, whose compiler spills where that of 8.6 does not
_ON_80: dict[tuple[int, int, str], _Ladder] = {
    (64, 2, "banded"): (
        AttentionConfig(64, 32, 4, 2, "128 rows spill 8 bytes on sm_80 with a key mask"),
        _TWO_BYTES_NARROW,
    ),
    (128, 2, "plain"): (
        AttentionConfig(128, 32, 8, 2, "64 keys a step spill 32 bytes on sm_80"),
        AttentionConfig(64, 32, 8, 2, _NARROW),
        _TWO_BYTES_NARROW,
    ),
}

_SHORT = "77 text tokens fill 3 steps of 32 but only 60 % of two steps of 64"

#: unmasked, at most 96 keys
_SHORT_STEPS = {
    (64, 2): AttentionConfig(64, 32, 4, 3, _SHORT),
    (96, 2): AttentionConfig(128, 32, 8, 2, _SHORT),
    (128, 2): AttentionConfig(128, 32, 8, 2, _SHORT),
}
_SHORT_OVERRIDES = {
    (10, 128, 2): AttentionConfig(64, 32, 8, 2, "128 rows spill 4 bytes on sm_100; not timed"),
}


def padded(head_dim: int) -> int:
    """The power of two, at least 16, that a head dim is computed in."""
    return max(16, 1 << (head_dim - 1).bit_length())


def split(head_dim: int, itemsize: int) -> tuple[int, int]:
    """The one or two powers of two (then the second is not 0) that a head dim is computed in.

    Two where they waste less than one: 40 as 32 + 16, 80 as 64 + 16, 96 as 64 + 32, 160 as
    128 + 32; but 120 as 128 and 200 as 256, whose two halves would be as wide. One power stays
    where two spill registers on sm_120: at 161…192 (128 + 64: 12 bytes a thread even without a
    mask) and in fp32 above 64 (64 + 16: 44 bytes with 16 x 32 tiles, where 128 does not).
    """
    whole = padded(head_dim)
    first = whole // 2
    if first < 32 or head_dim > (160 if itemsize < 4 else 64):
        return whole, 0
    second = padded(head_dim - first)
    return (first, second) if first + second < whole else (whole, 0)


def shared_bytes(
    config: AttentionConfig, head_dim: int, value_dim: int, itemsize: int, biased: bool = False
) -> int:
    """Shared memory a launch needs at most: the query tile, and `num_stages` times what a step of
    keys loads (keys, values and, for a dense bias, its tile)."""
    width, value_width = sum(split(head_dim, itemsize)), sum(split(value_dim, itemsize))
    # one stage is no pipeline: the bias then goes straight to registers
    tile = config.block_m if biased and config.num_stages > 1 else 0
    step = config.block_n * (width + value_width + tile)
    return itemsize * (config.block_m * width + config.num_stages * step)


def _width(head_dim: int, itemsize: int) -> int:
    """The class of the ladders that a head dim belongs to."""
    return next(width for width in _WIDTHS if sum(split(head_dim, itemsize)) <= width)


def ladder_for(
    capability: tuple[int, int],
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    keys: int,
    biased: bool = False,
    band: bool = False,
    shared_memory_bytes: int | None = None,
    *,
    packed: bool = False,
    key_mask: bool = False,
    dropout: bool = False,
) -> tuple[AttentionConfig, ...]:
    """Configurations that fit, best first; a refused launch goes on with the next.

    Args:
        capability: compute capability, e.g. (8, 6).
        head_dim: K. value_dim: Kv. keys: Mk, of the longest sequence.
        dtype: of query, key and value.
        biased: whether a dense bias is read. band: whether a band has a bound.
        shared_memory_bytes: the card's limit per block; default: the architecture's.
        packed, key_mask, dropout: whether there is one. (Packed sequences cost no registers worth
            a tile of their own.)

    Returns:
        At least one configuration, or () when none fits or a head dim is above MAX_HEAD_DIM.
    """
    if max(head_dim, value_dim) > MAX_HEAD_DIM or min(head_dim, value_dim) < 1:
        return ()
    if shared_memory_bytes is None:
        shared_memory_bytes = SHARED_MEMORY.get(capability, 49152)
    itemsize = dtype.itemsize
    width = _width(max(head_dim, value_dim), itemsize)
    kind = (
        "dropout" if dropout else "biased" if biased else "banded" if band or key_mask else "plain"
    )
    entry = (width, itemsize, kind)
    steps = _OVERRIDES.get((capability[0], *entry), _LADDERS[entry])
    if capability == (8, 0):
        steps = _ON_80.get(entry, steps)
    if keys <= 96 and kind == "plain" and (width, itemsize) in _SHORT_STEPS:
        short = _SHORT_STEPS[width, itemsize]
        steps = (_SHORT_OVERRIDES.get((capability[0], width, itemsize), short), *steps)
    return tuple(
        config
        for config in steps
        if shared_bytes(config, head_dim, value_dim, itemsize, biased) <= shared_memory_bytes
    )


def config_for(
    capability: tuple[int, int],
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    keys: int,
    biased: bool = False,
    band: bool = False,
    shared_memory_bytes: int | None = None,
    *,
    packed: bool = False,
    key_mask: bool = False,
    dropout: bool = False,
) -> AttentionConfig | None:
    """The first configuration of `ladder_for`, or None when none fits."""
    ladder = ladder_for(
        capability,
        head_dim,
        value_dim,
        dtype,
        keys,
        biased,
        band,
        shared_memory_bytes,
        packed=packed,
        key_mask=key_mask,
        dropout=dropout,
    )
    return ladder[0] if ladder else None
