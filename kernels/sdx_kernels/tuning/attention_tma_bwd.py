"""Launch configurations of attention's gradients through tensor descriptors (9.0 and newer).

Pure functions of architecture, shape class and dtype: no device is asked and nothing is timed.
"""

from dataclasses import dataclass, replace

import torch

from sdx_kernels.tuning.attention import SHARED_MEMORY, AttentionConfig, padded
from sdx_kernels.tuning.attention_bwd import backward_ladder_for

__all__ = [
    "TMA_KERNELS",
    "TmaBackwardLadder",
    "TmaGradConfig",
    "candidates",
    "ladder_for_tma_bwd",
    "tma_bwd_shared_bytes",
]

MAX_TMA_GRAD_DIM = 128

#: the kernels that load through descriptors: dk and dv; dq
TMA_KERNELS = ("keys", "queries")


@dataclass(frozen=True)
class TmaGradConfig(AttentionConfig):
    """One launch; `block_m` is always query rows and `block_n` keys.

    Attributes:
        registers: most registers a thread, so that more programs fit a multiprocessor; 0 = as many
            as the compiler likes.
    """

    registers: int = 0


@dataclass(frozen=True)
class TmaBackwardLadder:
    """Configurations of each kernel, best first; a refused launch goes on with the next."""

    rows: tuple[AttentionConfig, ...]
    keys: tuple[TmaGradConfig, ...]
    queries: tuple[TmaGradConfig, ...]


def tma_bwd_shared_bytes(
    kernel: str, config: TmaGradConfig, head_dim: int, value_dim: int, itemsize: int
) -> int:
    """Shared memory a launch needs at most.

    The tiles that a program owns, `num_stages` times those it loops over, two of weights for cards
    that multiply out of shared memory only, the barriers, and for the keys' kernel the rows' facts
    of each stage.
    """
    own, looped = config.block_m, config.block_n
    if kernel == "keys":
        own, looped = looped, own
    tiles = own + config.num_stages * looped
    facts = 8 * config.num_stages * looped if kernel == "keys" else 0
    width = padded(head_dim) + padded(value_dim)
    return itemsize * (tiles * width + 2 * own * looped) + facts + 1024


_CLEAN = "no spill ahead of time; not timed"
_THREE = (
    "three programs of 4 warps fit a multiprocessor of sm_90, no spill ahead of time; not timed"
)
_TWO = "two programs fit a multiprocessor of sm_90, no spill ahead of time; not timed"
_SERIAL = "64 queries a step spill 460 bytes on sm_120, ahead of time; not timed"

_Steps = tuple[TmaGradConfig, ...]

#: dk and dv, and dq, by (major compute capability, padded head dim), best first. sm_120 has none
#: for 128 dims: a program's own tiles are held in registers there, and all tiles tried spill
_KEYS: dict[tuple[int, int], _Steps] = {
    (9, 64): (TmaGradConfig(64, 64, 4, 3, _THREE, 168),),
    (9, 128): (TmaGradConfig(32, 64, 4, 3, _TWO),),
    (10, 64): (TmaGradConfig(64, 128, 8, 3, _CLEAN),),
    (10, 128): (TmaGradConfig(64, 64, 8, 3, _CLEAN),),
    (12, 64): (TmaGradConfig(32, 128, 8, 3, _SERIAL),),
}
_QUERIES: dict[tuple[int, int], _Steps] = {
    (9, 64): (TmaGradConfig(128, 64, 8, 3, _TWO, 128),),
    (9, 128): (TmaGradConfig(64, 32, 4, 3, _TWO),),
    (10, 64): (TmaGradConfig(128, 64, 8, 3, _CLEAN),),
    (10, 128): (TmaGradConfig(128, 64, 8, 3, _CLEAN),),
    (12, 64): (TmaGradConfig(128, 64, 8, 2, _CLEAN),),
}


def _fitting(
    kernel: str, steps: _Steps, dims: tuple[int, int], itemsize: int, limit: int
) -> _Steps:
    return tuple(c for c in steps if tma_bwd_shared_bytes(kernel, c, *dims, itemsize) <= limit)


def ladder_for_tma_bwd(
    capability: tuple[int, int],
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    shared_memory_bytes: int | None = None,
) -> TmaBackwardLadder | None:
    """Configurations that fit; None where a kernel has none.

    Args:
        capability: compute capability, e.g. (9, 0).
        head_dim: K. value_dim: Kv.
        dtype: of query, key and value.
        shared_memory_bytes: the card's limit per block; default: the architecture's.

    Returns:
        None below sm_90, where descriptors become plain loads; for a head dim above
        MAX_TMA_GRAD_DIM or whose rows are no multiple of 16 bytes; for fp32; or if nothing fits.
    """
    dims = (head_dim, value_dim)
    if capability < (9, 0) or dtype.itemsize != 2:
        return None
    if min(dims) < 8 or max(dims) > MAX_TMA_GRAD_DIM or any(dim % 8 for dim in dims):
        return None
    if shared_memory_bytes is None:
        shared_memory_bytes = SHARED_MEMORY.get(capability, 49152)
    size = capability[0], max(64, padded(max(dims)))
    portable = backward_ladder_for(
        capability, *dims, dtype, shared_memory_bytes=shared_memory_bytes
    )
    if portable is None:
        return None
    limits = dims, dtype.itemsize, shared_memory_bytes
    keys = _fitting("keys", _KEYS.get(size, ()), *limits)
    queries = _fitting("queries", _QUERIES.get(size, ()), *limits)
    return TmaBackwardLadder(portable.rows, keys, queries) if keys and queries else None


#: what a benchmark tries beside the ladder on compute capability 9.0: tiles of the keys' kernel and
#: of the queries', as rows, keys, warps, stages and most registers; None = the ladder's
_Tile = tuple[int, int, int, int, int]
_TRIED: dict[int, tuple[tuple[_Tile | None, _Tile | None], ...]] = {
    64: (
        ((32, 128, 8, 3, 128), (64, 64, 4, 3, 0)),
        ((64, 128, 8, 3, 0), (64, 64, 4, 2, 128)),
        ((32, 64, 4, 4, 128), (64, 128, 4, 2, 0)),
        ((64, 64, 4, 2, 168), (128, 64, 8, 2, 128)),
        ((32, 128, 4, 3, 0), (128, 128, 8, 3, 0)),
        ((32, 128, 8, 4, 128), (64, 32, 4, 3, 0)),
    ),
    128: (
        ((64, 128, 8, 2, 0), (128, 64, 8, 2, 0)),
        ((64, 64, 8, 3, 0), (64, 64, 4, 2, 0)),
        ((32, 64, 8, 3, 0), (128, 64, 8, 3, 0)),
        ((32, 128, 8, 3, 0), (64, 64, 8, 3, 0)),
    ),
}


def candidates(
    capability: tuple[int, int], head_dim: int, value_dim: int, dtype: torch.dtype
) -> dict[str, TmaBackwardLadder]:
    """Ladders beyond the shipped one that a benchmark may try, by name."""
    shipped = ladder_for_tma_bwd(capability, head_dim, value_dim, dtype)
    if shipped is None or capability[0] != 9:
        return {}

    def step(tile: _Tile | None, ours: _Steps) -> tuple[_Steps, str]:
        config = ours[0] if tile is None else TmaGradConfig(*tile[:4], "candidate", tile[4])
        shape = f"{config.block_m}x{config.block_n}x{config.num_warps}w{config.num_stages}s"
        return (config,), shape + (f"-r{config.registers}" if config.registers else "")

    named = {}
    for keys_tile, queries_tile in _TRIED[max(64, padded(max(head_dim, value_dim)))]:
        keys, keys_name = step(keys_tile, shipped.keys)
        queries, queries_name = step(queries_tile, shipped.queries)
        tried = replace(shipped, keys=keys, queries=queries)
        named[f"keys-{keys_name}-queries-{queries_name}"] = tried
    return named
