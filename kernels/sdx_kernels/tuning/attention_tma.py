"""Launch configurations of attention through tensor descriptors (compute capability 9.0 and newer).

Pure functions of architecture, shape class and dtype: no device is asked and nothing is timed.
"""

from dataclasses import dataclass, replace

import torch

from sdx_kernels.tuning.attention import SHARED_MEMORY, AttentionConfig, padded

__all__ = [
    "MAX_TMA_HEAD_DIM",
    "TmaConfig",
    "candidates",
    "ladder_for_tma",
    "tma_shared_bytes",
    "warm_keys",
]

MAX_TMA_HEAD_DIM = 128


@dataclass(frozen=True)
class TmaConfig(AttentionConfig):
    """One launch.

    Attributes:
        optimistic: whether rows keep the reference that the first keys gave them, checked once at
            the end; otherwise the online form with a maximum and a rescale in every step.
        warm_share: sixteenths of the keys that go through the online form before the reference is
            kept; 0 = the first block's maximum is all. More means fewer redone tiles where scores
            are peaked, and more of the slower form.
        registers: most registers a thread, so that more programs fit a multiprocessor; 0 = as many
            as the compiler likes.
    """

    optimistic: bool = True
    warm_share: int = 0
    registers: int = 0


def warm_keys(config: TmaConfig, keys: int) -> int:
    """Keys of the online part that precedes the optimistic one, a multiple of the tile."""
    return -(-keys * config.warm_share // (16 * config.block_n)) * config.block_n


def tma_shared_bytes(config: TmaConfig, head_dim: int, value_dim: int, itemsize: int) -> int:
    """Shared memory a launch needs at most: the query tile, and `num_stages` steps of keys."""
    width, value_width = padded(head_dim), padded(value_dim)
    step = config.block_n * (width + value_width)
    return itemsize * (config.block_m * max(width, value_width) + config.num_stages * step) + 256


_FASTEST = "fastest of those tried at D 64 on an H200 (docs/kernels/attention.md)"
_FASTEST_40 = "fastest of those tried at D 40 on an H200, 2x8x4096^2 (docs/kernels/attention.md)"
_WIDE = "no spill on sm_90 and sm_100 ahead of time; not timed there yet"
_NARROW = "smaller step, for cards with less shared memory"
_SPLIT = "the largest clean step of sm_120: 64 x 64 with 4 warps spills 516 bytes there"
_ONLINE = (
    "a row of 65,504 equal scores sums to what the check takes for an overflow, so that so many "
    "keys go through the online form at once"
)

#: fp16 sums of this many equal weights may reach the check's limit
_MOST_OPTIMISTIC_FP16_KEYS = 65504

#: by (padded head dim, up to 2,048 keys): largest first
_LADDERS: dict[tuple[int, bool], tuple[TmaConfig, ...]] = {
    (64, False): (TmaConfig(64, 128, 4, 3, _FASTEST), TmaConfig(64, 64, 4, 3, _NARROW)),
    (64, True): (TmaConfig(64, 64, 4, 3, _FASTEST), TmaConfig(64, 64, 4, 2, _NARROW)),
    (128, False): (TmaConfig(128, 128, 8, 2, _WIDE), TmaConfig(128, 64, 8, 2, _SPLIT)),
    (128, True): (TmaConfig(128, 64, 8, 3, _WIDE), TmaConfig(128, 64, 8, 2, _SPLIT)),
}

#: the first step on compute capability 9.x, where a card timed another one as the fastest
_FIRST_ON_9: dict[str, TmaConfig] = {
    "ragged": TmaConfig(128, 64, 4, 3, _FASTEST_40),
    "wide": TmaConfig(64, 64, 4, 3, "fastest of those tried at D 80 and D 128 on an H200"),
    "long": TmaConfig(
        128, 64, 4, 3, "H200, 2x10x16,384^2 D 64, bf16: 2.59 ms, 64 x 128 takes 2.72"
    ),
    "short": TmaConfig(
        64, 64, 4, 2,
        "five programs a multiprocessor hold all 640 tiles of 2x20x1,024^2 at once: 0.0321 ms on "
        "an H200, 0.0354 with three stages and three programs",
        registers=104,
    ),
}  # fmt: skip


def _first_on_9(dim: int, keys: int) -> tuple[TmaConfig, ...]:
    if padded(dim) > 64:
        return (_FIRST_ON_9["wide"],)
    if keys <= 2048:
        return (_FIRST_ON_9["short"],)
    if dim < 64:
        return (_FIRST_ON_9["ragged"],)
    return (_FIRST_ON_9["long"],) if keys > 8192 else ()


def ladder_for_tma(
    capability: tuple[int, int],
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    keys: int,
    shared_memory_bytes: int | None = None,
) -> tuple[TmaConfig, ...]:
    """Configurations that fit, best first; a refused launch goes on with the next.

    Args:
        capability: compute capability, e.g. (9, 0).
        head_dim: K. value_dim: Kv. keys: Mk.
        dtype: of query, key and value.
        shared_memory_bytes: the card's limit per block; default: the architecture's.

    Returns:
        () below sm_90, where descriptors become plain loads; for a head dim above
        MAX_TMA_HEAD_DIM or whose rows are no multiple of 16 bytes; for fp32; or if nothing fits.
    """
    dims = (head_dim, value_dim)
    if capability < (9, 0) or dtype.itemsize != 2 or keys < 1:
        return ()
    if min(dims) < 8 or max(dims) > MAX_TMA_HEAD_DIM or any(dim % 8 for dim in dims):
        return ()
    if shared_memory_bytes is None:
        shared_memory_bytes = SHARED_MEMORY.get(capability, 49152)
    width = max(64, padded(max(dims)))
    steps = _LADDERS[width, keys <= 2048]
    if capability[0] == 9:
        steps = (*_first_on_9(max(dims), keys), *steps)
    if capability[0] == 12 and width == 64:
        # two stages of 64 x 64 spill 4 bytes there, three do not, and those fit
        steps = tuple(config for config in steps if config.num_stages > 2)
    online = dtype == torch.float16 and keys >= _MOST_OPTIMISTIC_FP16_KEYS
    return tuple(
        replace(config, optimistic=False, source=_ONLINE) if online else config
        for config in steps
        if tma_shared_bytes(config, head_dim, value_dim, dtype.itemsize) <= shared_memory_bytes
    )


#: what a benchmark tries beside the ladder: rows, keys, warps, stages, and the variants
_TRIED: dict[int, tuple[TmaConfig, ...]] = {
    64: (
        TmaConfig(64, 128, 4, 3, ""),
        TmaConfig(64, 128, 4, 3, "", warm_share=1),
        TmaConfig(64, 128, 4, 3, "", optimistic=False),
        TmaConfig(64, 128, 4, 2, ""),
        TmaConfig(64, 64, 4, 3, ""),
        TmaConfig(64, 64, 4, 2, "", registers=104),
        TmaConfig(128, 64, 4, 3, ""),
    ),
    128: (
        TmaConfig(128, 128, 8, 2, ""),
        TmaConfig(128, 64, 8, 3, ""),
        TmaConfig(64, 64, 4, 2, ""),
        TmaConfig(128, 128, 8, 2, "", optimistic=False),
    ),
}


def candidates(
    capability: tuple[int, int], head_dim: int, value_dim: int, dtype: torch.dtype, keys: int
) -> dict[str, TmaConfig]:
    """Configurations beyond the ladder that a benchmark may try, by name; likeliest first."""
    ladder = ladder_for_tma(capability, head_dim, value_dim, dtype, keys)
    if not ladder:
        return {}
    limit = SHARED_MEMORY.get(capability, 49152)
    named = {}
    for config in _TRIED[max(64, padded(max(head_dim, value_dim)))]:
        if config.block_n >= 2 * max(16, keys):
            continue
        tried = replace(config, source="candidate, not timed yet")
        tail = f"-warm{config.warm_share}" if config.warm_share else ""
        name = (
            f"tma-{config.block_m}x{config.block_n}x{config.num_warps}w{config.num_stages}s"
            + ("" if config.optimistic else "-online")
            + tail
            + (f"-r{config.registers}" if config.registers else "")
        )
        if (
            tma_shared_bytes(tried, head_dim, value_dim, dtype.itemsize) <= limit
            and replace(ladder[0], source=tried.source) != tried
        ):
            named[name] = tried
    return named
