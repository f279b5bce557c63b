"""What a backward needs of each row beforehand, and the gradient of a bias that rows share.

It knows pointers, strides and tiles, and must not choose tiles or judge inputs.
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
)
from sdx_kernels._triton.attention_parts import band_range, dropout_keep, load_rows

__all__ = ["bias_kernel", "rows_kernel"]


@triton.jit(do_not_specialize=LENGTHS)
def rows_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, tail_ptr, bias_ptr, exists_ptr,
    query_starts_ptr, key_starts_ptr, seed_ptr,
    q_stride_b, q_stride_m, q_stride_h, k_stride_b, k_stride_n, k_stride_h,
    v_stride_b, v_stride_n, v_stride_h, grad_stride_b, grad_stride_m, grad_stride_h,
    bias_stride_b, bias_stride_h, bias_stride_m, bias_stride_n, exists_stride_b, exists_stride_n,
    H, group, Mq, Mk, all_queries, all_keys, left, right, from_end, scale, inverse_keep, threshold,
    out_ptr, out_stride_b, out_stride_m, out_stride_h,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BIAS: tl.constexpr, BIAS_SUMS: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, KEY_MASK: tl.constexpr, PACKED: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, LOG2E: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """delta[b, h, m] = Σ grad · out, and tail[b, h, m] = log2 Σ exp(s − lse).

    The tail is 0 but for rows with |lse| ≥ WIDE, where fp32 no longer holds what the sum added to
    the largest score (all of it in a row of finfo(fp32).min): these pass over their keys again, and
    their delta is Σ P · dP of the same weights, which cancels what rounding did to `out`. The tail
    is NaN where the row's lse or delta is not finite, so that nobody has to look at both.
    """
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

    grad_ptrs = (
        grad_ptr + b * grad_stride_b + h * grad_stride_h + row0 * grad_stride_m
        + local_m[:, None] * grad_stride_m + offs_dv[None, :]
    )  # fmt: skip
    out_ptrs = (
        out_ptr + b * out_stride_b + h * out_stride_h + row0 * out_stride_m
        + local_m[:, None] * out_stride_m + offs_dv[None, :]
    )  # fmt: skip
    grad = load_rows(grad_ptrs, inside, offs_dv, DV, BLOCK_DV == DV, True)
    out = load_rows(out_ptrs, inside, offs_dv, DV, BLOCK_DV == DV, True)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    at = (b * H + h) * all_queries + row0 + local_m
    lse = tl.load(lse_ptr + at, mask=inside, other=0.0)
    # a row of nothing has scores of −inf too: −inf − −inf would be NaN
    base = tl.where(lse == float("-inf"), 0.0, lse)

    # −inf is no wide row: it has nothing to sum
    wide = (tl.abs(lse) >= WIDE) & (tl.abs(lse) < float("inf"))
    total = tl.zeros((BLOCK_M,), tl.float32)
    product = tl.zeros((BLOCK_M,), tl.float32)
    if tl.max(wide.to(tl.int32), 0) != 0:
        shift = from_end * (Mk - Mq)
        low, high = shift - left, shift + right
        last = tl.minimum(first + BLOCK_M, Mq) - 1
        begin, _, _, end = band_range(first, last, Mk, shift, left, right, LEFT, RIGHT, BLOCK_N)
        q_ptrs = (
            q_ptr + b * q_stride_b + h * q_stride_h + row0 * q_stride_m
            + local_m[:, None] * q_stride_m + offs_d[None, :]
        )  # fmt: skip
        q = load_rows(q_ptrs, inside, offs_d, D, BLOCK_D == D, True)
        k_head = k_ptr + b * k_stride_b + h // group * k_stride_h + k_first * k_stride_n
        k_offs = local_n[:, None] * k_stride_n + offs_d[None, :]
        v_head = v_ptr + b * v_stride_b + h // group * v_stride_h + k_first * v_stride_n
        v_offs = local_n[:, None] * v_stride_n + offs_dv[None, :]
        seed = tl.zeros((), tl.int64)
        if DROPOUT:
            seed = tl.load(seed_ptr)
        bias_head = bias_ptr + b * bias_stride_b + h * bias_stride_h + row0 * bias_stride_m
        bias_offs = local_m[:, None] * bias_stride_m + local_n[None, :] * bias_stride_n
        for n in range(begin, end, BLOCK_N):
            here = n + local_n
            there = here < Mk
            wide_n = tl.full((), 0, tl.int64) + n
            if KEY_MASK:
                exists_ptrs = exists_ptr + b * exists_stride_b + wide_n * exists_stride_n
                exists_ptrs += local_n * exists_stride_n
                there = there & (tl.load(exists_ptrs, mask=there, other=0) != 0)
            k_ptrs = k_head + wide_n * k_stride_n + k_offs
            k = load_rows(k_ptrs, there, offs_d, D, BLOCK_D == D, True)
            allowed = allowed_pairs(rows[:, None], here[None, :], Mq, Mk, low, high, LEFT, RIGHT)
            allowed = allowed & there[None, :]
            x = exponents(
                tl.dot(q, tl.trans(k), input_precision=PRECISION), base[:, None], 0.0,
                bias_head + wide_n * bias_stride_n + bias_offs, allowed, scale, BIAS, LOG2E,
            )  # fmt: skip
            # 2⁶⁴ is far above any sum of weights, and far below fp32's end
            x = tl.minimum(x, 64.0, propagate_nan=tl.PropagateNan.ALL)
            p = tl.where(allowed, tl.math.exp2(x), 0.0)
            v = load_rows(
                v_head + wide_n * v_stride_n + v_offs, there, offs_dv, DV, BLOCK_DV == DV, True
            )
            dp = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
            if DROPOUT:
                keep = dropout_keep(seed, item * H + h, rows, here, threshold)
                dp = tl.where(keep, dp * inverse_keep, 0.0)
            total += tl.sum(p, 1)
            product += tl.sum(tl.where(allowed, p * dp, 0.0), 1)
    known = wide & (total != 0.0)
    total = tl.where(known, total, 1.0)
    tail = tl.math.log2(total)
    delta = tl.where(known, product / total, delta)
    finite = (tl.abs(delta) < float("inf")) & (lse < float("inf"))
    tl.store(delta_ptr + at, delta, mask=inside)
    tl.store(tail_ptr + at, tl.where(finite, tail, float("nan")), mask=inside)


@triton.jit(do_not_specialize=[*LENGTHS, "batch", "bias_heads"])
def bias_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, tail_ptr, bias_ptr, exists_ptr,
    query_starts_ptr, key_starts_ptr, seed_ptr,
    q_stride_b, q_stride_m, q_stride_h, k_stride_b, k_stride_n, k_stride_h,
    v_stride_b, v_stride_n, v_stride_h, grad_stride_b, grad_stride_m, grad_stride_h,
    bias_stride_b, bias_stride_h, bias_stride_m, bias_stride_n, exists_stride_b, exists_stride_n,
    H, group, Mq, Mk, all_queries, all_keys, left, right, from_end, scale, inverse_keep, threshold,
    dbias_ptr, batch, bias_batch, bias_heads,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BIAS: tl.constexpr, BIAS_SUMS: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, KEY_MASK: tl.constexpr, PACKED: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, LOG2E: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One tile of a bias's gradient, the sum of dS over the items and heads that share the bias.

    dbias: `[bias_batch, bias_heads, Mq, Mk]` contiguous, where each of the first two is 1 or all.
    """
    pid = tl.program_id(0)
    tiles_n = tl.cdiv(Mk, BLOCK_N)
    tiles_m = tl.cdiv(Mq, BLOCK_M)
    first_n = pid % tiles_n * BLOCK_N
    first_m = pid // tiles_n % tiles_m * BLOCK_M
    entry = pid // tiles_n // tiles_m
    sharing_heads = H // bias_heads
    local_m, local_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    offs_d, offs_dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    rows, keys = first_m + local_m, first_n + local_n
    wide_m, wide_n = first_m.to(tl.int64), first_n.to(tl.int64)
    inside = rows < Mq
    seed = tl.zeros((), tl.int64)
    if DROPOUT:
        seed = tl.load(seed_ptr)
    shift = from_end * (Mk - Mq)
    low, high = shift - left, shift + right
    members = (batch // bias_batch) * sharing_heads
    if LEFT:
        members = tl.where(first_n + BLOCK_N - 1 >= first_m + low, members, 0)
    if RIGHT:
        members = tl.where(first_n <= first_m + BLOCK_M - 1 + high, members, 0)
    q_offs = local_m[:, None] * q_stride_m + offs_d[None, :]
    grad_offs = local_m[:, None] * grad_stride_m + offs_dv[None, :]
    k_offs = local_n[:, None] * k_stride_n + offs_d[None, :]
    v_offs = local_n[:, None] * v_stride_n + offs_dv[None, :]
    bias_offs = local_m[:, None] * bias_stride_m + local_n[None, :] * bias_stride_n
    bias_tile = wide_m * bias_stride_m + wide_n * bias_stride_n + bias_offs
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for member in range(0, members):
        b = (entry // bias_heads * (batch // bias_batch) + member // sharing_heads).to(tl.int64)
        h = (entry % bias_heads * sharing_heads + member % sharing_heads).to(tl.int64)
        there = keys < Mk
        if KEY_MASK:
            exists_ptrs = exists_ptr + b * exists_stride_b + wide_n * exists_stride_n
            exists_ptrs += local_n * exists_stride_n
            there = there & (tl.load(exists_ptrs, mask=there, other=0) != 0)
        q_head = q_ptr + b * q_stride_b + h * q_stride_h + wide_m * q_stride_m
        grad_head = grad_ptr + b * grad_stride_b + h * grad_stride_h + wide_m * grad_stride_m
        k_head = k_ptr + b * k_stride_b + h // group * k_stride_h + wide_n * k_stride_n
        v_head = v_ptr + b * v_stride_b + h // group * v_stride_h + wide_n * v_stride_n
        q = load_rows(q_head + q_offs, inside, offs_d, D, BLOCK_D == D, True)
        grad = load_rows(grad_head + grad_offs, inside, offs_dv, DV, BLOCK_DV == DV, True)
        k = load_rows(k_head + k_offs, there, offs_d, D, BLOCK_D == D, True)
        v = load_rows(v_head + v_offs, there, offs_dv, DV, BLOCK_DV == DV, True)
        at = (b * H + h) * all_queries + rows
        lse, delta, tail = row_facts(lse_ptr + at, delta_ptr + at, tail_ptr + at, inside)
        allowed = allowed_pairs(rows[:, None], keys[None, :], Mq, Mk, low, high, LEFT, RIGHT)
        total += score_grads(
            q, grad, k, v, lse, delta, tail, rows, keys, allowed & there[None, :],
            bias_ptr + b * bias_stride_b + h * bias_stride_h + bias_tile, seed, b * H + h, scale,
            inverse_keep, threshold, BIAS, DROPOUT, True, PRECISION, LOG2E,
        )  # fmt: skip
    dbias_ptrs = dbias_ptr + (entry.to(tl.int64) * Mq + wide_m) * Mk
    dbias_ptrs += local_m[:, None] * Mk + keys[None, :]
    stored = inside[:, None] & (keys[None, :] < Mk)
    tl.store(dbias_ptrs, total.to(dbias_ptr.dtype.element_ty), mask=stored)
