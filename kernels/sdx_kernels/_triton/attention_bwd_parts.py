"""Device code that the backward kernels share: sequences, weights recomputed from the LSE, dS.

It knows tiles of scores in either orientation, and must not know which gradient they serve.
"""

import triton
import triton.language as tl

from sdx_kernels._triton.attention_parts import dropout_keep

__all__ = [
    "LENGTHS",
    "allowed_pairs",
    "exponents",
    "row_facts",
    "score_grads",
    "sequence",
    "split_tiles",
    "weights",
]

#: what no kernel may be specialised on: a new picture size must not compile anything
LENGTHS = [
    "bias_stride_b", "bias_stride_h", "exists_stride_b", "H", "group", "Mq", "Mk", "all_queries",
    "all_keys", "left", "right", "from_end", "threshold",
]  # fmt: skip


@triton.jit
def sequence(item, starts_ptr, length, PACKED: tl.constexpr):
    """(first row, number of rows) of one batch item or packed sequence."""
    first = tl.zeros((), tl.int32)
    count = first + length
    if PACKED:
        first = tl.load(starts_ptr + item)
        count = tl.load(starts_ptr + item + 1) - first
    return first.to(tl.int64), count


@triton.jit
def split_tiles(begin, inner, inner_end, end, BLOCK: tl.constexpr):
    """`band_range` in numbers of tiles: (whole ones, tested ones, tested ones before the whole)."""
    inners = (inner_end - inner) // BLOCK
    tiles = tl.cdiv(tl.maximum(end - begin, 0), BLOCK)
    before = tl.where(inners > 0, (inner - begin) // BLOCK, tiles)
    return inners, tiles - inners, before


@triton.jit
def allowed_pairs(rows, keys, Mq, Mk, low, high, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Pairs inside the lengths and the band: row + low ≤ key ≤ row + high."""
    allowed = (rows < Mq) & (keys < Mk)
    if LEFT:
        allowed = allowed & (keys >= rows + low)
    if RIGHT:
        allowed = allowed & (keys <= rows + high)
    return allowed


@triton.jit
def exponents(
    products, lse, tail, bias_ptrs, inside, scale, BIAS: tl.constexpr, LOG2E: tl.constexpr
):
    """log2 of the weights, for any orientation of the tile."""
    s = products * scale
    if BIAS != 0:
        b = tl.load(bias_ptrs, mask=inside, other=0)
        if BIAS == 2:
            # added, not selected: NaN of a masked key stays NaN, as in forward
            s += tl.where(b != 0, 0.0, float("-inf"))
        else:
            s += b.to(tl.float32)
    # the factor comes after the subtraction: finfo(fp32).min · log2(e) would be −inf
    return (s - lse) * LOG2E - tail


@triton.jit
def weights(exponents):
    # no weight is above 1; scores of 1e10 differ by more than exp2 can take between two passes
    return tl.math.exp2(tl.minimum(exponents, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def row_facts(lse_ptrs, delta_ptrs, tail_ptrs, inside):
    """(lse, delta, tail); rows that attend nothing or do not exist get weights exp2(−inf) = 0."""
    lse = tl.load(lse_ptrs, mask=inside, other=float("inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    delta = tl.load(delta_ptrs, mask=inside, other=0.0)
    tail = tl.load(tail_ptrs, mask=inside, other=0.0)
    return lse, delta, tail


@triton.jit
def score_grads(
    q, grad, k, v, lse, delta, tail, rows, keys, allowed, bias_ptrs, seed, head, scale,
    inverse_keep, threshold,
    BIAS: tl.constexpr, DROPOUT: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr,
    LOG2E: tl.constexpr,
):  # fmt: skip
    """dS = P ∘ (dP − delta) of a [rows, keys] tile, the scale not yet applied."""
    p = weights(
        exponents(
            tl.dot(q, tl.trans(k), input_precision=PRECISION), lse[:, None], tail[:, None],
            bias_ptrs, allowed, scale, BIAS, LOG2E,
        )
    )  # fmt: skip
    dp = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
    if DROPOUT:
        keep = dropout_keep(seed, head, rows, keys, threshold)
        dp = tl.where(keep, dp * inverse_keep, 0.0)
    ds = p * (dp - delta[:, None])
    if EDGE:
        ds = tl.where(allowed, ds, 0.0)
    return ds
