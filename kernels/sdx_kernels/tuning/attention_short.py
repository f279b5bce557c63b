"""Launch configurations of attention over few keys, where a program holds all of them.

Pure functions of architecture, shape class and dtype: no device is asked and nothing is timed.
"""

from dataclasses import dataclass, replace

import torch

from sdx_kernels.tuning.attention import SHARED_MEMORY, AttentionConfig, padded

__all__ = [
    "MAX_SHORT_HEAD_DIM",
    "MAX_SHORT_KEYS",
    "ShortConfig",
    "candidates",
    "ladder_for_short",
    "parts_for",
    "segments",
    "short_shared_bytes",
]

#: 257 keys (a picture encoder's tokens) fill 256 + 16
MAX_SHORT_KEYS = 272

#: above this a program cannot hold keys and values of one head on any card
MAX_SHORT_HEAD_DIM = 128


@dataclass(frozen=True)
class ShortConfig(AttentionConfig):
    """One launch; `block_n` keys and `rest` more are held at once, never looped over.

    Attributes:
        rest: keys of the second segment, 0 for none; Triton's blocks are powers of two, so that 77
            keys are 64 + 16 rather than 128.
        programs: programs a multiprocessor that the grid aims at, each looping over several query
            tiles; 0 = a program for every tile, without a loop.
    """

    rest: int = 0
    programs: int = 0


def segments(keys: int) -> tuple[int, int]:
    """The two powers of two (the second may be 0), 16 or more, that hold `keys` most tightly."""
    keys = max(16, -(-keys // 16) * 16)
    first = 1 << (keys.bit_length() - 1)
    rest = keys - first
    second = 0 if rest == 0 else padded(rest)
    return (first * 2, 0) if second == first else (first, second)


def parts_for(
    config: ShortConfig, batch: int, heads: int, queries: int, multiprocessors: int
) -> int:
    """Programs that share the query tiles of one head, a pure function of shape and card."""
    tiles = -(-queries // config.block_m)
    if config.programs == 0:
        return tiles
    wanted = max(1, config.programs * max(1, multiprocessors))
    # equal shares: 64 tiles over 27 programs would give some 3 and others 2
    share = max(1, -(-tiles * batch * heads // wanted))
    return -(-tiles // share)


def short_shared_bytes(config: ShortConfig, head_dim: int, value_dim: int, itemsize: int) -> int:
    """Shared memory a launch needs at most: keys, values, and query tiles in flight."""
    width, value_width = padded(head_dim), padded(value_dim)
    held = (config.block_n + config.rest) * (width + value_width)
    stages = max(1, config.num_stages - 1)
    tile = config.block_m * max(width, value_width)
    return itemsize * (held + stages * tile)


_TILE = "fastest of those tried on an H200 at 2x20x1,024 queries of 77 keys, D 64: 0.0080 ms"
_WALK = (
    "more tiles than fit at once read the keys again and again: two programs a multiprocessor that "
    "walk take 0.0126 ms at 2x10x4,096 queries of 77 keys, D 64, a program for each tile 0.0139"
)
_FEW_QUERIES = (
    "a frame's 16 tokens in one small tile: 0.116 against 0.206 ms with 64 rows on an H200"
)
_ROWS = "64 rows fill one warpgroup's product; no spill ahead of time; not timed yet"
_FEW_ROWS = "scores of 32 rows leave room for a bias or for many keys; no spill ahead of time"
_MANY_WARPS = "a bias over 160 keys at head dim 128 fits the registers of 8 warps only"
_SMALL = "smallest step: one tile a program, for cards with less shared memory"


def _steps(width: int, held: int, biased: bool, queries: int) -> tuple[ShortConfig, ...]:
    """Configurations by padded head dim, keys held, kind and length, best first."""
    tile = ShortConfig(64, 0, 4, 1, _TILE)
    walk = ShortConfig(64, 0, 4, 3, _WALK, programs=2)
    one = ShortConfig(16, 0, 2, 1, _FEW_QUERIES)
    rows = ShortConfig(64, 0, 4, 2, _ROWS, programs=4)
    half = ShortConfig(32, 0, 4, 2, _FEW_ROWS, programs=4)
    many = ShortConfig(32, 0, 8, 2, _MANY_WARPS, programs=4)
    small = ShortConfig(32, 0, 4, 1, _SMALL)
    if width == 128:
        if held <= 96:
            return (half,) if biased else (rows,)
        if held <= 160:
            return (many,) if biased else (half,)
        return ()
    if held <= 96 and not biased:
        # without a bias 64 rows fit every card (32 KiB), and 32 of them would spill on sm_89
        few = queries <= 16 and held <= 32
        return (one, tile) if few else (walk, tile) if queries > 2048 else (tile,)
    if held <= 96 or (held <= 160 and not biased):
        return (rows, small)
    if held <= 160:
        return (half, small)
    return (small,)


def ladder_for_short(
    capability: tuple[int, int],
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    keys: int,
    biased: bool = False,
    shared_memory_bytes: int | None = None,
    *,
    queries: int = 1 << 20,
) -> tuple[ShortConfig, ...]:
    """Configurations that fit, best first; a refused launch goes on with the next.

    Args:
        capability: compute capability, e.g. (8, 6).
        head_dim: K. value_dim: Kv. keys: Mk.
        dtype: of query, key and value.
        biased: whether a dense bias is read.
        shared_memory_bytes: the card's limit per block; default: the architecture's.
        queries: Mq.

    Returns:
        () where keys or head dims are too many, the dtype is not a 16-bit one (the three products
        of fp32 spill with every key at hand) or nothing fits.
    """
    dims = (head_dim, value_dim)
    if not 1 <= keys <= MAX_SHORT_KEYS or min(dims) < 1 or max(dims) > MAX_SHORT_HEAD_DIM:
        return ()
    if dtype.itemsize != 2:
        return ()
    if shared_memory_bytes is None:
        shared_memory_bytes = SHARED_MEMORY.get(capability, 49152)
    first, rest = segments(keys)
    width = max(64, padded(max(dims)))
    return tuple(
        config
        for step in _steps(width, first + rest, biased, queries)
        for config in (replace(step, block_n=first, rest=rest),)
        if short_shared_bytes(config, head_dim, value_dim, dtype.itemsize) <= shared_memory_bytes
    )


#: (rows, warps, stages, programs a multiprocessor): what a benchmark tries beside the ladder
_TRIED = (
    (64, 4, 3, 2),
    (64, 4, 3, 3),
    (64, 4, 1, 0),
    (128, 8, 1, 0),
    (32, 2, 1, 0),
)


def candidates(
    capability: tuple[int, int], head_dim: int, value_dim: int, dtype: torch.dtype, keys: int
) -> dict[str, ShortConfig]:
    """Configurations beyond the ladder that a benchmark may try, by name; unmasked only."""
    ladder = ladder_for_short(capability, head_dim, value_dim, dtype, keys)
    if not ladder:
        return {}
    named = {}
    for rows, warps, stages, programs in _TRIED:
        config = replace(
            ladder[0],
            block_m=rows,
            num_warps=warps,
            num_stages=stages,
            programs=programs,
            source="candidate, not timed yet",
        )
        name = f"short-{rows}x{warps}w{stages}s" + (f"-p{programs}" if programs else "-tile")
        if short_shared_bytes(config, head_dim, value_dim, dtype.itemsize) <= SHARED_MEMORY.get(
            capability, 49152
        ):
            named[name] = config
    return named
