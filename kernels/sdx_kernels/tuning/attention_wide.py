"""Launch configurations of attention with wide heads (257…512 dims, fp32 from 129).

Pure functions of architecture, dims, dtype and kind: no device is asked and nothing is timed.
"""

from dataclasses import dataclass, replace

import torch

from sdx_kernels.tuning.attention import SHARED_MEMORY, padded

__all__ = [
    "MAX_WIDE_DIM",
    "SCRATCH_BYTES",
    "TOPS",
    "Tile",
    "WideConfig",
    "WideGradConfig",
    "WideKind",
    "WideOnePassConfig",
    "candidates",
    "grad_candidates",
    "padded",
    "scratch_slices",
    "shared_bytes",
    "wide_grad_ladder_for",
    "wide_ladder_for",
]

#: where the fused kernels end, and the widest that anybody computes
MAX_WIDE_DIM = 512

#: scratch of one slice: 8192 of 16384 queries forward and 4096 backward in 16 bits, so that the
#: products with it are 256 and 128 tiles of 128 x 128 for the 132 multiprocessors of an H200
SCRATCH_BYTES = 1 << 28


@dataclass(frozen=True)
class WideKind:
    """What a kernel is compiled for, beside its tile."""

    head_dim: int
    value_dim: int
    dtype: torch.dtype
    bias: torch.dtype | None = None
    left: bool = False
    right: bool = False
    key_mask: bool = False
    with_lse: bool = True
    bias_grad: bool = False

    @property
    def masked(self) -> bool:
        return self.bias is not None or self.left or self.right or self.key_mask

    @property
    def flags(self) -> dict[str, object]:
        """The masks as compile-time arguments."""
        code = 0 if self.bias is None else 2 if self.bias == torch.bool else 1
        masks = {"LEFT": self.left, "RIGHT": self.right, "KEY_MASK": self.key_mask}
        return {"BIAS": code, **masks}

    def precision(self, precision: str) -> dict[str, object]:
        """How products are computed, as a compile-time argument; 16 bits know one way only."""
        return {"PRECISION": precision if self.dtype == torch.float32 else "ieee"}


@dataclass(frozen=True)
class Tile:
    """A tile of rows x columns, summed in steps of `chunk`, with warps and pipeline stages."""

    block_m: int
    block_n: int
    chunk: int
    num_warps: int
    num_stages: int

    def shared_bytes(self, itemsize: int) -> int:
        """Shared memory that such a product needs at most: its steps, or its result passed on."""
        steps = self.num_stages * (self.block_m + self.block_n) * self.chunk
        # fp32 is held as two tf32 parts on sm_90 and sm_100; barriers and the like: 1 KB
        parts = 2 if itemsize == 4 else 1
        return itemsize * parts * max(steps, self.block_m * self.block_n) + 1024


@dataclass(frozen=True)
class WideConfig:
    """A forward in two passes over a scratch of weights.

    Attributes:
        scores: tile of queries x keys, in steps of head dims.
        mix: tile of queries x value dims, in steps of keys; the step divides the keys of `scores`.
        source: where the numbers came from.
        precision: of fp32 products, "tf32x3" or "ieee".
    """

    scores: Tile
    mix: Tile
    source: str
    precision: str = "tf32x3"


@dataclass(frozen=True)
class WideOnePassConfig:
    """A forward in one pass and without scratch.

    Attributes:
        block_m, block_n: query rows and keys a tile.
        block_dv: value dims that one program holds; wider values take more programs, each of
            which computes the scores anew.
        chunk: dims of a step of the score product; unused where `whole`.
        whole: the query tile stays in shared memory, all dims wide.
        num_warps, num_stages: warps and pipeline stages.
        source, precision: as in `WideConfig`.
    """

    block_m: int
    block_n: int
    block_dv: int
    chunk: int
    whole: bool
    num_warps: int
    num_stages: int
    source: str
    precision: str = "tf32x3"


@dataclass(frozen=True)
class WideGradConfig:
    """A backward: facts of rows, weights into the scratch, products with it."""

    rows: Tile
    weights: Tile
    sums: Tile
    source: str
    precision: str = "tf32x3"


#: rows x key tiles of the small kernel between the two passes of a forward
TOPS = Tile(32, 64, 1, 4, 1)

#: tensor-core instruction that Triton picks, by major compute capability
_UNITS = {8: "mma.sync", 9: "wgmma", 10: "tcgen05", 12: "mma.sync"}

_CLEAN = (
    "no spill on sm_80, 86, 89, 90, 100 and 120 when compiled ahead of time, with every mask at "
    "once and with none; not timed yet"
)
_FP32 = (
    "three tf32 products in steps of at most 32 dims or keys: the tensor core truncates within a "
    "step, and steps are added in fp32; 512 dims of unit-normal values lose 1.9e-5, in one sum of "
    "512 1.8e-4, in torch's fp32 3.3e-5 (truncation simulated); " + _CLEAN
)
_FP32_MASKED = "a band tests every value, which costs registers: half the value dims; " + _FP32
_NARROW = "smaller tiles, for cards with less shared memory"

_LADDERS: dict[tuple[int, str], tuple[WideConfig, ...]] = {
    (2, "plain"): (
        WideConfig(Tile(128, 128, 64, 8, 3), Tile(128, 128, 64, 8, 3), _CLEAN),
        WideConfig(Tile(64, 64, 32, 4, 2), Tile(64, 64, 32, 4, 2), _NARROW),
    ),
    (2, "masked"): (
        WideConfig(Tile(128, 128, 64, 8, 2), Tile(128, 128, 32, 8, 3), _CLEAN),
        WideConfig(Tile(64, 64, 32, 4, 2), Tile(64, 64, 32, 4, 2), _NARROW),
    ),
    (4, "plain"): (
        WideConfig(Tile(128, 64, 32, 8, 2), Tile(64, 128, 32, 8, 2), _FP32),
        WideConfig(Tile(32, 32, 32, 4, 2), Tile(32, 32, 32, 4, 2), _NARROW),
    ),
    (4, "masked"): (
        WideConfig(Tile(128, 64, 32, 8, 2), Tile(64, 64, 16, 8, 2), _FP32_MASKED),
        WideConfig(Tile(32, 32, 32, 4, 2), Tile(32, 32, 16, 4, 2), _NARROW),
    ),
}

#: the first step on compute capability 9.x, unmasked, 16 bits, dims above 256
_ONE_PASS_ON_9 = WideOnePassConfig(
    128, 32, 256, 0, True, 8, 2,
    "128 rows keep 224 KB of queries, keys and values in flight, two programs of 256 value dims "
    "share a row: 1.5 x the operations, no scratch; 2.28 ms against 3.05 in two passes on an H200, "
    "16,384 tokens of 512 dims",
)  # fmt: skip

_GRAD_LADDERS: dict[tuple[str, int], tuple[WideGradConfig, ...]] = {
    ("wgmma", 2): (
        WideGradConfig(
            Tile(32, 32, 64, 8, 1), Tile(128, 64, 64, 8, 3), Tile(128, 128, 64, 8, 3), _CLEAN
        ),
    ),
    ("mma.sync", 2): (
        WideGradConfig(
            Tile(32, 32, 64, 8, 1),
            Tile(128, 64, 64, 8, 3),
            Tile(128, 128, 32, 8, 3),
            "steps of 64 spill 8 bytes on sm_80 where the scratch is transposed; " + _CLEAN,
        ),
    ),
    ("wgmma", 4): (
        WideGradConfig(
            Tile(32, 32, 32, 8, 2), Tile(64, 32, 32, 8, 2), Tile(64, 128, 32, 8, 2), _FP32
        ),
    ),
    ("mma.sync", 4): (
        WideGradConfig(
            Tile(32, 32, 32, 8, 2),
            Tile(64, 32, 32, 8, 2),
            Tile(64, 64, 32, 8, 2),
            "64 x 64 weights spill 64 bytes, 64 x 128 products up to 44; " + _FP32,
        ),
    ),
}
_GRAD_LADDERS["tcgen05", 2] = _GRAD_LADDERS["wgmma", 2]
_GRAD_LADDERS["tcgen05", 4] = _GRAD_LADDERS["wgmma", 4]

#: products with a scratch of fp32, which a bias's gradient is summed from: tiles of 128 x 128 need
#: 112 KB and spill 204 bytes on sm_90
_PRECISE_SUMS = Tile(64, 128, 32, 8, 2)

#: weights in 16 bits under masks, or of dims that no step divides: tiles of 128 x 64 spill 108…128
#: bytes on sm_80 where the dims are ragged
_MASKED_WEIGHTS = Tile(64, 64, 64, 8, 3)

_NARROW_GRAD = WideGradConfig(
    Tile(32, 32, 32, 4, 1), Tile(32, 32, 32, 4, 1), Tile(32, 32, 32, 4, 1), _NARROW
)


def _fits(capability: tuple[int, int], kind: WideKind) -> bool:
    # not sorted(): torch.compile cannot sort sizes that it keeps dynamic
    least, most = min(kind.head_dim, kind.value_dim), max(kind.head_dim, kind.value_dim)
    return capability[0] in _UNITS and least >= 1 and most <= MAX_WIDE_DIM


def _limit(capability: tuple[int, int], shared_memory_bytes: int | None) -> int:
    return shared_memory_bytes or SHARED_MEMORY.get(capability, 49152)


def shared_bytes(config: WideConfig | WideOnePassConfig | WideGradConfig, kind: WideKind) -> int:
    """Shared memory that a block of the configuration's hungriest launch needs at most."""
    size = kind.dtype.itemsize
    if isinstance(config, WideConfig):
        return max(config.scores.shared_bytes(size), config.mix.shared_bytes(size))
    if isinstance(config, WideGradConfig):
        return max(t.shared_bytes(size) for t in (config.rows, config.weights, config.sums))
    if not config.whole:
        steps = config.num_stages * (config.block_m + config.block_n) * config.chunk
        values = config.block_n * config.block_dv + config.block_m * config.block_n
        return size * (2 if size == 4 else 1) * max(steps, values) + 1024
    width = padded(kind.head_dim)
    keys = config.num_stages * config.block_n * (width + config.block_dv)
    return size * (config.block_m * width + keys) + 1024


def wide_ladder_for(
    capability: tuple[int, int], kind: WideKind, shared_memory_bytes: int | None = None
) -> tuple[WideConfig | WideOnePassConfig, ...]:
    """Forward configurations that fit, best first; a refused launch goes on with the next.

    Args:
        capability: compute capability, e.g. (8, 6).
        kind: dims, dtype and masks.
        shared_memory_bytes: the card's limit per block; default: the architecture's.

    Returns:
        At least one configuration, or () when none fits or a dim is above MAX_WIDE_DIM.
    """
    if not _fits(capability, kind):
        return ()
    limit = _limit(capability, shared_memory_bytes)
    steps: tuple[WideConfig | WideOnePassConfig, ...]
    steps = _LADDERS[kind.dtype.itemsize, "masked" if kind.masked else "plain"]
    whole = min(kind.head_dim, kind.value_dim) > 256
    if capability[0] == 9 and kind.dtype.itemsize == 2 and whole and not kind.masked:
        steps = (_ONE_PASS_ON_9, *steps)
    return tuple(step for step in steps if shared_bytes(step, kind) <= limit)


def wide_grad_ladder_for(
    capability: tuple[int, int], kind: WideKind, shared_memory_bytes: int | None = None
) -> tuple[WideGradConfig, ...]:
    """Backward configurations that fit, best first; arguments as of `wide_ladder_for`."""
    if not _fits(capability, kind):
        return ()
    limit = _limit(capability, shared_memory_bytes)
    steps = (*_GRAD_LADDERS[_UNITS[capability[0]], kind.dtype.itemsize], _NARROW_GRAD)
    ragged = kind.head_dim % 64 != 0 or kind.value_dim % 64 != 0
    if (kind.masked or ragged) and kind.dtype.itemsize == 2:
        steps = (*(replace(step, weights=_MASKED_WEIGHTS) for step in steps[:-1]), steps[-1])
    if kind.bias_grad and kind.dtype.itemsize == 2:
        steps = tuple(replace(step, sums=_PRECISE_SUMS) for step in steps)
    return tuple(step for step in steps if shared_bytes(step, kind) <= limit)


#: alternatives to time, by name; none is dispatched
_CANDIDATES: dict[int, dict[str, WideConfig | WideOnePassConfig]] = {
    2: {
        "two-passes": _LADDERS[2, "plain"][0],
        "one-pass-64-rows": WideOnePassConfig(
            64, 32, 512, 64, False, 8, 3,
            "64 x 512 fp32 sums are 128 registers a thread; 64 x 64 tiles spill 96…424 bytes",
        ),
        "two-passes-wide-mix": WideConfig(
            Tile(128, 128, 64, 8, 3), Tile(128, 256, 32, 8, 3),
            "256 value dims a tile read the weights half as often",
        ),
        "two-passes-small": WideConfig(
            Tile(128, 64, 64, 4, 3), Tile(128, 64, 32, 4, 3), "several small programs a processor"
        ),
    },
    4: {
        "two-passes-ieee": WideConfig(
            Tile(128, 64, 16, 8, 2), Tile(64, 64, 16, 8, 2),
            "plain fp32 products without tensor cores", "ieee",
        ),
        "one-pass-64-rows": WideOnePassConfig(
            64, 32, 128, 32, False, 8, 2,
            "256 value dims spill 24 (mma.sync) to 328 bytes (wgmma), so that four programs share "
            "a row: 2.5 x the operations, no scratch",
        ),
    },
}  # fmt: skip

_GRAD_CANDIDATES: dict[int, dict[str, WideGradConfig]] = {
    2: {
        "small": WideGradConfig(
            Tile(32, 32, 64, 8, 1), Tile(64, 64, 64, 4, 3), Tile(64, 64, 64, 4, 3),
            "several small programs a processor",
        ),
        "wide-sums": WideGradConfig(
            Tile(32, 32, 64, 8, 1), Tile(128, 64, 64, 8, 3), Tile(128, 256, 32, 8, 3),
            "256 dims a tile read the scratch half as often",
        ),
    },
    4: {
        "ieee": WideGradConfig(
            Tile(32, 32, 16, 8, 2), Tile(64, 64, 16, 8, 2), Tile(64, 64, 16, 8, 2),
            "plain fp32 products without tensor cores", "ieee",
        ),
    },
}  # fmt: skip


def candidates(
    capability: tuple[int, int], kind: WideKind
) -> dict[str, WideConfig | WideOnePassConfig]:
    """Forward configurations to time against the shipped ladder, by name; those that fit."""
    found = _CANDIDATES[kind.dtype.itemsize] if _fits(capability, kind) else {}
    limit = _limit(capability, None)
    return {name: config for name, config in found.items() if shared_bytes(config, kind) <= limit}


def grad_candidates(capability: tuple[int, int], kind: WideKind) -> dict[str, WideGradConfig]:
    """Backward configurations to time against the shipped ladder, by name; those that fit."""
    found = _GRAD_CANDIDATES[kind.dtype.itemsize] if _fits(capability, kind) else {}
    limit = _limit(capability, None)
    return {name: config for name, config in found.items() if shared_bytes(config, kind) <= limit}


def scratch_slices(
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    dtype: torch.dtype,
    copies: int,
    limit: int = SCRATCH_BYTES,
) -> tuple[tuple[slice, slice], ...]:
    """(batch, query) slices whose scratch fills at most `limit` bytes, or 128 rows of one item.

    A pure function of the shapes, so that a backward always adds in the same order.

    Args:
        batch, heads, queries, keys: B, H, Mq, Mk.
        dtype: of the scratch. copies: matrices in it: 1 forward, 2 backward.
    """
    row = copies * dtype.itemsize * heads * keys
    items = max(1, min(batch, limit // max(1, row * queries)))
    rows = max(1, queries) if row * queries <= limit else max(128, limit // row // 128 * 128)
    return tuple(
        (slice(item, min(item + items, batch)), slice(first, min(first + rows, queries)))
        for item in range(0, batch, items)
        for first in range(0, queries, rows)
    )
