"""Gradients of keys and values, one owner per key tile, and of queries, one per query tile.

It knows pointers, strides and tiles, and must not choose tiles or judge inputs. Every sum has one
owner and a fixed order, without atomics, so equal inputs give equal bits.
"""

import triton
import triton.language as tl

from sdx_kernels._triton.attention_bwd_parts import (
    LENGTHS,
    allowed_pairs,
    exponents,
    row_facts,
    score_grads,
    sequence,
    split_tiles,
    weights,
)
from sdx_kernels._triton.attention_parts import band_range, dropout_keep, load_rows

__all__ = ["keys_kernel", "queries_kernel"]


@triton.jit
def _queries_loop(
    dk, dv, bias_sum, k, v, keys, q_head, grad_head, lse_head, delta_head, tail_head, bias_head,
    bias_offs, q_stride_m, grad_stride_m, bias_stride_m, seed, head, begin, tiles, before, gap,
    Mq, Mk, low, high, scale, inverse_keep, threshold,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BIAS: tl.constexpr,
    BIAS_SUMS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, DROPOUT: tl.constexpr,
    EDGE: tl.constexpr, PRECISION: tl.constexpr, LOG2E: tl.constexpr,
):  # fmt: skip
    """Adds `tiles` query tiles to a key tile's gradients, `gap` rows left out after `before`."""
    BAND: tl.constexpr = LEFT or RIGHT
    FULL_D: tl.constexpr = k.shape[1] == D
    FULL_DV: tl.constexpr = v.shape[1] == DV
    local_m = tl.arange(0, BLOCK_M)
    offs_d, offs_dv = tl.arange(0, k.shape[1]), tl.arange(0, v.shape[1])
    q_offs = local_m[:, None] * q_stride_m + offs_d[None, :]
    grad_offs = local_m[:, None] * grad_stride_m + offs_dv[None, :]
    for tile in range(0, tiles):
        m = begin + tile * BLOCK_M
        if EDGE:
            m += tl.where(tile >= before, gap, 0)
        wide_m = tl.full((), 0, tl.int64) + m
        rows = m + local_m
        inside = rows < Mq
        lse, delta, tail = row_facts(lse_head + rows, delta_head + rows, tail_head + rows, inside)
        if EDGE and BAND:
            # 0 · NaN is NaN: a spoilt row is not read, so that it cannot reach keys it excludes
            inside = inside & (tail == tail)
        # [BLOCK_M, BLOCK_D], [BLOCK_M, BLOCK_DV]
        q_ptrs = q_head + wide_m * q_stride_m + q_offs
        q = load_rows(q_ptrs, inside, offs_d, D, FULL_D, EDGE)
        grad_ptrs = grad_head + wide_m * grad_stride_m + grad_offs
        grad = load_rows(grad_ptrs, inside, offs_dv, DV, FULL_DV, EDGE)
        # [BLOCK_N, BLOCK_M]: transposed, since the weights are the left side of the products below
        allowed = allowed_pairs(
            rows[None, :], keys[:, None], Mq, Mk, low, high, LEFT and EDGE, RIGHT and EDGE
        )
        p = weights(
            exponents(
                tl.dot(k, tl.trans(q), input_precision=PRECISION), lse[None, :], tail[None, :],
                bias_head + wide_m * bias_stride_m + bias_offs, allowed, scale, BIAS, LOG2E,
            )
        )  # fmt: skip
        if EDGE and BAND:
            p = tl.where(allowed, p, 0.0)
        dp = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
        if DROPOUT:
            keep = tl.trans(dropout_keep(seed, head, rows, keys, threshold))
            kept = tl.where(keep, p, 0.0)
            dp = tl.where(keep, dp * inverse_keep, 0.0)
        else:
            kept = p
        dv = tl.dot(kept.to(grad.dtype), grad, dv, input_precision=PRECISION)
        ds = p * (dp - delta[None, :])
        if EDGE and BAND:
            ds = tl.where(allowed, ds, 0.0)
        if BIAS_SUMS:
            bias_sum += tl.sum(ds, 1)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv, bias_sum


@triton.jit(do_not_specialize=LENGTHS)
def keys_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, tail_ptr, bias_ptr, exists_ptr,
    query_starts_ptr, key_starts_ptr, seed_ptr,
    q_stride_b, q_stride_m, q_stride_h, k_stride_b, k_stride_n, k_stride_h,
    v_stride_b, v_stride_n, v_stride_h, grad_stride_b, grad_stride_m, grad_stride_h,
    bias_stride_b, bias_stride_h, bias_stride_m, bias_stride_n, exists_stride_b, exists_stride_n,
    H, group, Mq, Mk, all_queries, all_keys, left, right, from_end, scale, inverse_keep, threshold,
    dk_ptr, dv_ptr, dbias_ptr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BIAS: tl.constexpr, BIAS_SUMS: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, KEY_MASK: tl.constexpr, PACKED: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, LOG2E: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """dk and dv of one key tile of one key head, summed over the group's query heads.

    BIAS_SUMS also writes each query head's sum of dS over the queries, fp32 `[B, H, Mk]`.
    """
    pid = tl.program_id(0)
    tiles = tl.cdiv(Mk, BLOCK_N)
    pair = pid // tiles
    key_heads = H // group
    item, key_head = pair // key_heads, (pair % key_heads).to(tl.int64)
    q_first, Mq = sequence(item, query_starts_ptr, Mq, PACKED)
    k_first, Mk = sequence(item, key_starts_ptr, Mk, PACKED)
    b = tl.zeros((), tl.int64)
    if not PACKED:
        b += item
    first = pid % tiles * BLOCK_N
    if first >= Mk:
        return
    local_m, local_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    offs_d, offs_dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    keys = first + local_n
    key0 = k_first + first
    there = keys < Mk
    if KEY_MASK:
        exists_ptrs = exists_ptr + b * exists_stride_b + key0 * exists_stride_n
        exists_ptrs += local_n * exists_stride_n
        there = there & (tl.load(exists_ptrs, mask=there, other=0) != 0)
    k_ptrs = (
        k_ptr + b * k_stride_b + key_head * k_stride_h + key0 * k_stride_n
        + local_n[:, None] * k_stride_n + offs_d[None, :]
    )  # fmt: skip
    v_ptrs = (
        v_ptr + b * v_stride_b + key_head * v_stride_h + key0 * v_stride_n
        + local_n[:, None] * v_stride_n + offs_dv[None, :]
    )  # fmt: skip
    k = load_rows(k_ptrs, there, offs_d, D, BLOCK_D == D, True)
    v = load_rows(v_ptrs, there, offs_dv, DV, BLOCK_DV == DV, True)
    bias_offs = local_n[:, None] * bias_stride_n + local_m[None, :] * bias_stride_m
    seed = tl.zeros((), tl.int64)
    if DROPOUT:
        seed = tl.load(seed_ptr)

    shift = from_end * (Mk - Mq)
    low, high = shift - left, shift + right
    last = tl.minimum(first + BLOCK_N, Mk) - 1
    # the same band seen from the keys
    begin, inner, inner_end, end = band_range(
        first, last, Mq, -shift, right, left, RIGHT, LEFT, BLOCK_M
    )
    inners, edges, before = split_tiles(begin, inner, inner_end, end, BLOCK_M)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)
    for member in range(0, group):
        h = key_head * group + member
        q_head = q_ptr + b * q_stride_b + h * q_stride_h + q_first * q_stride_m
        grad_head = grad_ptr + b * grad_stride_b + h * grad_stride_h + q_first * grad_stride_m
        at = (b * H + h) * all_queries + q_first
        bias_head = bias_ptr + b * bias_stride_b + h * bias_stride_h + key0 * bias_stride_n
        head = item * H + h
        bias_sum = tl.zeros((BLOCK_N,), tl.float32)
        dk, dv, bias_sum = _queries_loop(
            dk, dv, bias_sum, k, v, keys, q_head, grad_head, lse_ptr + at, delta_ptr + at,
            tail_ptr + at, bias_head, bias_offs, q_stride_m, grad_stride_m, bias_stride_m, seed,
            head, inner, inners, 0, 0, Mq, Mk, low, high, scale, inverse_keep, threshold,
            D, DV, BLOCK_M, BIAS, BIAS_SUMS, LEFT, RIGHT, DROPOUT, False, PRECISION, LOG2E,
        )  # fmt: skip
        dk, dv, bias_sum = _queries_loop(
            dk, dv, bias_sum, k, v, keys, q_head, grad_head, lse_ptr + at, delta_ptr + at,
            tail_ptr + at, bias_head, bias_offs, q_stride_m, grad_stride_m, bias_stride_m, seed,
            head, begin, edges, before, inners * BLOCK_M, Mq, Mk, low, high, scale, inverse_keep,
            threshold, D, DV, BLOCK_M, BIAS, BIAS_SUMS, LEFT, RIGHT, DROPOUT, True, PRECISION,
            LOG2E,
        )  # fmt: skip
        if BIAS_SUMS:
            bias_sum = tl.where(there, bias_sum, 0.0)
            tl.store(dbias_ptr + (b * H + h) * all_keys + keys, bias_sum, mask=keys < Mk)

    if KEY_MASK:
        # an absent key was computed as zeros; its own gradients are none
        dk = tl.where(there[:, None], dk, 0.0)
        dv = tl.where(there[:, None], dv, 0.0)
    # [B, Mk, Hk, D] and [B, Mk, Hk, DV], contiguous
    line = b * all_keys + key0
    stored = (keys < Mk)[:, None]
    dk_ptrs = (
        dk_ptr + (line * key_heads + key_head) * D
        + local_n[:, None] * (key_heads * D) + offs_d[None, :]
    )  # fmt: skip
    dv_ptrs = (
        dv_ptr + (line * key_heads + key_head) * DV
        + local_n[:, None] * (key_heads * DV) + offs_dv[None, :]
    )  # fmt: skip
    dk = (dk * scale).to(dk_ptr.dtype.element_ty)
    dv = (dv * inverse_keep).to(dv_ptr.dtype.element_ty)
    tl.store(dk_ptrs, dk, mask=stored & (offs_d[None, :] < D))
    tl.store(dv_ptrs, dv, mask=stored & (offs_dv[None, :] < DV))


@triton.jit
def _keys_loop(
    dq, q, grad, lse, delta, tail, rows, k_head, v_head, bias_head,
    exists_head, bias_offs, k_stride_n, v_stride_n, bias_stride_n, exists_stride_n, seed, head,
    begin, tiles, before, gap, Mq, Mk, low, high, scale, inverse_keep, threshold,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr, BIAS: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, KEY_MASK: tl.constexpr,
    DROPOUT: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr, LOG2E: tl.constexpr,
):  # fmt: skip
    """Adds `tiles` key tiles to a query tile's gradient, `gap` keys left out after `before`."""
    FULL_D: tl.constexpr = q.shape[1] == D
    FULL_DV: tl.constexpr = grad.shape[1] == DV
    local_n = tl.arange(0, BLOCK_N)
    offs_d, offs_dv = tl.arange(0, q.shape[1]), tl.arange(0, grad.shape[1])
    k_offs = local_n[:, None] * k_stride_n + offs_d[None, :]
    v_offs = local_n[:, None] * v_stride_n + offs_dv[None, :]
    for tile in range(0, tiles):
        n = begin + tile * BLOCK_N
        if EDGE:
            n += tl.where(tile >= before, gap, 0)
        wide_n = tl.full((), 0, tl.int64) + n
        keys = n + local_n
        there = keys < Mk
        if KEY_MASK:
            exists_ptrs = exists_head + wide_n * exists_stride_n + local_n * exists_stride_n
            there = there & (tl.load(exists_ptrs, mask=there, other=0) != 0)
        # [BLOCK_N, BLOCK_D], [BLOCK_N, BLOCK_DV]
        k = load_rows(k_head + wide_n * k_stride_n + k_offs, there, offs_d, D, FULL_D, EDGE)
        v = load_rows(v_head + wide_n * v_stride_n + v_offs, there, offs_dv, DV, FULL_DV, EDGE)
        allowed = allowed_pairs(
            rows[:, None], keys[None, :], Mq, Mk, low, high, LEFT and EDGE, RIGHT and EDGE
        )
        if KEY_MASK:
            allowed = allowed & there[None, :]
        ds = score_grads(
            q, grad, k, v, lse, delta, tail, rows, keys, allowed,
            bias_head + wide_n * bias_stride_n + bias_offs, seed, head, scale, inverse_keep,
            threshold, BIAS, DROPOUT, EDGE, PRECISION, LOG2E,
        )  # fmt: skip
        if EDGE and (LEFT or RIGHT):
            # 0 · NaN is NaN: a key outside the band must not reach rows that exclude it
            k = tl.where(tl.abs(k.to(tl.float32)) < float("inf"), k, tl.zeros_like(k))
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=LENGTHS)
def queries_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, tail_ptr, bias_ptr, exists_ptr,
    query_starts_ptr, key_starts_ptr, seed_ptr,
    q_stride_b, q_stride_m, q_stride_h, k_stride_b, k_stride_n, k_stride_h,
    v_stride_b, v_stride_n, v_stride_h, grad_stride_b, grad_stride_m, grad_stride_h,
    bias_stride_b, bias_stride_h, bias_stride_m, bias_stride_n, exists_stride_b, exists_stride_n,
    H, group, Mq, Mk, all_queries, all_keys, left, right, from_end, scale, inverse_keep, threshold,
    dq_ptr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BIAS: tl.constexpr, BIAS_SUMS: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, KEY_MASK: tl.constexpr, PACKED: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, LOG2E: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """dq of one query tile of one head."""
    pid = tl.program_id(0)
    tiles = tl.cdiv(Mq, BLOCK_M)
    pair = pid // tiles
    item, h = pair // H, (pair % H).to(tl.int64)
    q_first, Mq = sequence(item, query_starts_ptr, Mq, PACKED)
    k_first, Mk = sequence(item, key_starts_ptr, Mk, PACKED)
    b = tl.zeros((), tl.int64)
    if not PACKED:
        b += item
    first = pid % tiles * BLOCK_M
    if first >= Mq:
        return
    local_m, local_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    offs_d, offs_dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    rows = first + local_m
    inside = rows < Mq
    row0 = q_first + first
    key_head = h // group
    q_ptrs = (
        q_ptr + b * q_stride_b + h * q_stride_h + row0 * q_stride_m
        + local_m[:, None] * q_stride_m + offs_d[None, :]
    )  # fmt: skip
    grad_ptrs = (
        grad_ptr + b * grad_stride_b + h * grad_stride_h + row0 * grad_stride_m
        + local_m[:, None] * grad_stride_m + offs_dv[None, :]
    )  # fmt: skip
    q = load_rows(q_ptrs, inside, offs_d, D, BLOCK_D == D, True)
    grad = load_rows(grad_ptrs, inside, offs_dv, DV, BLOCK_DV == DV, True)
    at = (b * H + h) * all_queries + row0 + local_m
    lse, delta, tail = row_facts(lse_ptr + at, delta_ptr + at, tail_ptr + at, inside)
    k_head = k_ptr + b * k_stride_b + key_head * k_stride_h + k_first * k_stride_n
    v_head = v_ptr + b * v_stride_b + key_head * v_stride_h + k_first * v_stride_n
    bias_head = bias_ptr + b * bias_stride_b + h * bias_stride_h + row0 * bias_stride_m
    bias_offs = local_m[:, None] * bias_stride_m + local_n[None, :] * bias_stride_n
    exists_head = exists_ptr + b * exists_stride_b
    seed = tl.zeros((), tl.int64)
    if DROPOUT:
        seed = tl.load(seed_ptr)
    head = item * H + h

    shift = from_end * (Mk - Mq)
    low, high = shift - left, shift + right
    last = tl.minimum(first + BLOCK_M, Mq) - 1
    begin, inner, inner_end, end = band_range(
        first, last, Mk, shift, left, right, LEFT, RIGHT, BLOCK_N
    )
    if KEY_MASK:
        # any key may be absent: no tile goes untested
        inner_end = inner
    inners, edges, before = split_tiles(begin, inner, inner_end, end, BLOCK_N)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if not KEY_MASK:
        dq = _keys_loop(
            dq, q, grad, lse, delta, tail, rows, k_head, v_head, bias_head,
            exists_head, bias_offs, k_stride_n, v_stride_n, bias_stride_n, exists_stride_n, seed,
            head, inner, inners, 0, 0, Mq, Mk, low, high, scale, inverse_keep, threshold,
            D, DV, BLOCK_N, BIAS, LEFT, RIGHT, KEY_MASK, DROPOUT, False, PRECISION, LOG2E,
        )  # fmt: skip
    dq = _keys_loop(
        dq, q, grad, lse, delta, tail, rows, k_head, v_head, bias_head,
        exists_head, bias_offs, k_stride_n, v_stride_n, bias_stride_n, exists_stride_n, seed,
        head, begin, edges, before, inners * BLOCK_N, Mq, Mk, low, high, scale, inverse_keep,
        threshold, D, DV, BLOCK_N, BIAS, LEFT, RIGHT, KEY_MASK, DROPOUT, True, PRECISION,
        LOG2E,
    )  # fmt: skip

    # [B, Mq, H, D], contiguous
    dq_ptrs = (
        dq_ptr + ((b * all_queries + row0) * H + h) * D
        + local_m[:, None] * (H * D) + offs_d[None, :]
    )  # fmt: skip
    dq = (dq * scale).to(dq_ptr.dtype.element_ty)
    tl.store(dq_ptrs, dq, mask=inside[:, None] & (offs_d[None, :] < D))
