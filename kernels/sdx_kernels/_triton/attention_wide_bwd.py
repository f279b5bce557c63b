"""Backward attention of wide heads: weights and their gradients into a scratch, then products.

At 512 dims a score costs 10 · 512 operations and its two scratch values 4 bytes each way, so that
memory is no limit, while dk and dv of one tile alone would fill a multiprocessor's registers.
It knows pointers, strides and tiles, and must not choose tiles, slices or judge inputs.
"""

import triton
import triton.language as tl

from sdx_kernels._triton.attention_wide import (
    allowed_keys,
    keys_that_exist,
    load_rows,
    product,
    tile_bias,
)

__all__ = [
    "attention_wide_rows_kernel",
    "attention_wide_sum_kernel",
    "attention_wide_weights_kernel",
]


# lengths and offsets are never specialised: a new picture size must not compile anything
@triton.jit(
    do_not_specialize=[
        "H", "group", "Mq", "Mk", "low", "high", "mask_stride_b", "bias_stride_b", "bias_stride_h",
    ]
)  # fmt: skip
def attention_wide_rows_kernel(
    q_ptr, k_ptr, grad_ptr, out_ptr, bias_ptr, mask_ptr, lse_ptr, delta_ptr, norm_ptr, scale,
    q_stride_b, q_stride_m, q_stride_h,
    k_stride_b, k_stride_n, k_stride_h,
    grad_stride_b, grad_stride_m, grad_stride_h,
    out_stride_b, out_stride_m, out_stride_h,
    bias_stride_b, bias_stride_h, bias_stride_m, bias_stride_n,
    mask_stride_b, H, group, Mq, Mk, low, high,
    D: tl.constexpr, DV: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BIAS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, KEY_MASK: tl.constexpr,
    PRECISION: tl.constexpr, LOG2E: tl.constexpr, HUGE: tl.constexpr,
):  # fmt: skip
    """delta[b, h, m] = grad[b, m, h] · out[b, m, h], and norm[b, h, m] = Σ exp(score − lse).

    norm is 1 and not computed where |lse| < HUGE. Beyond, fp32 has too few digits left for the
    row's sum: n keys at finfo.min give lse = finfo.min and weights of 1 instead of 1 / n.
    """
    pid = tl.program_id(0)
    tiles = tl.cdiv(Mq, BLOCK_M)
    head = pid // tiles
    tile = pid % tiles
    local_m = tl.arange(0, BLOCK_M)
    local_n = tl.arange(0, BLOCK_N)
    rows = tile * BLOCK_M + local_m
    rows_inside = rows < Mq
    b = (head // H).to(tl.int64)
    h = (head % H).to(tl.int64)
    tile_row = tile.to(tl.int64) * BLOCK_M
    place = head.to(tl.int64) * Mq + rows

    grad_head = grad_ptr + b * grad_stride_b + h * grad_stride_h + tile_row * grad_stride_m
    out_head = out_ptr + b * out_stride_b + h * out_stride_h + tile_row * out_stride_m
    delta = tl.zeros((BLOCK_M,), tl.float32)
    for first in range(0, DV, CHUNK):
        g = load_rows(grad_head, local_m * grad_stride_m, rows_inside, first, DV, CHUNK)
        o = load_rows(out_head, local_m * out_stride_m, rows_inside, first, DV, CHUNK)
        delta += tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(delta_ptr + place, delta, mask=rows_inside)
    lse = tl.load(lse_ptr + place, mask=rows_inside, other=0.0)
    size = tl.where(tl.abs(lse) < float("inf"), tl.abs(lse), 0.0)
    norm = tl.full((BLOCK_M,), 1.0, tl.float32)
    if tl.max(size, 0) >= HUGE:
        q_head = q_ptr + b * q_stride_b + h * q_stride_h + tile_row * q_stride_m
        k_head = k_ptr + b * k_stride_b + (h // group) * k_stride_h
        bias_head = bias_ptr + b * bias_stride_b + h * bias_stride_h + tile_row * bias_stride_m
        total = tl.zeros((BLOCK_M,), tl.float32)
        for n in range(0, Mk, BLOCK_N):
            keys = n + local_n
            first_key = tl.full((), 0, tl.int64) + n
            exists = keys_that_exist(n, local_n, mask_ptr + b * mask_stride_b, Mk, KEY_MASK)
            s = product(
                q_head, q_head, local_m * q_stride_m, rows_inside,
                k_head + first_key * k_stride_n, local_n * k_stride_n, exists,
                D, CHUNK, False, PRECISION,
            ) * scale  # fmt: skip
            if BIAS != 0:
                offs = local_m[:, None] * bias_stride_m + local_n[None, :] * bias_stride_n
                inside = rows_inside[:, None] & (keys < Mk)[None, :]
                s += tile_bias(bias_head + first_key * bias_stride_n + offs, inside, BIAS)
            allowed = allowed_keys(rows, keys, exists, low, high, LEFT, RIGHT)
            p = tl.math.exp2((s - lse[:, None]) * LOG2E)
            total += tl.sum(tl.where(allowed, p, 0.0), 1)
        # a row that attends nothing has a sum of 0, and gradients of 0 only through a norm of 1
        norm = tl.where((size >= HUGE) & (total > 0.0), total, 1.0)
    tl.store(norm_ptr + place, norm, mask=rows_inside)


@triton.jit(
    do_not_specialize=[
        "item", "row", "rows", "H", "group", "Mq", "Mk", "low", "high",
        "mask_stride_b", "bias_stride_b", "bias_stride_h",
    ]
)  # fmt: skip
def attention_wide_weights_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, bias_ptr, mask_ptr, lse_ptr, delta_ptr, norm_ptr,
    p_ptr, ds_ptr, scale, p_factor,
    q_stride_b, q_stride_m, q_stride_h,
    k_stride_b, k_stride_n, k_stride_h,
    v_stride_b, v_stride_n, v_stride_h,
    grad_stride_b, grad_stride_m, grad_stride_h,
    bias_stride_b, bias_stride_h, bias_stride_m, bias_stride_n,
    p_stride_h, p_stride_m,
    mask_stride_b, item, row, rows, H, group, Mq, Mk, low, high,
    D: tl.constexpr, DV: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BIAS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, KEY_MASK: tl.constexpr,
    PRECISION: tl.constexpr, LOG2E: tl.constexpr,
):  # fmt: skip
    """One tile of p = exp(score − lse) · p_factor and of ds = p · (grad · vᵀ − delta).

    A launch covers rows row…row + rows of every head of the items from `item` on; the scratch
    counts both from there. An excluded weight and its gradient are 0.
    """
    pid = tl.program_id(0)
    tiles = tl.cdiv(rows, BLOCK_M)
    key_tiles = tl.cdiv(Mk, BLOCK_N)
    tile = pid % tiles
    key_tile = (pid // tiles) % key_tiles
    local_head = pid // (tiles * key_tiles)
    local_m = tl.arange(0, BLOCK_M)
    local_n = tl.arange(0, BLOCK_N)
    rows_inside = tile * BLOCK_M + local_m < rows
    queries = row + tile * BLOCK_M + local_m
    keys = key_tile * BLOCK_N + local_n
    b = (item + local_head // H).to(tl.int64)
    h = (local_head % H).to(tl.int64)
    kv_h = h // group
    first_row = row + tile.to(tl.int64) * BLOCK_M
    first_key = key_tile.to(tl.int64) * BLOCK_N
    exists = keys_that_exist(
        key_tile * BLOCK_N, local_n, mask_ptr + b * mask_stride_b, Mk, KEY_MASK
    )

    q_head = q_ptr + b * q_stride_b + h * q_stride_h + first_row * q_stride_m
    k_head = k_ptr + b * k_stride_b + kv_h * k_stride_h + first_key * k_stride_n
    s = product(
        q_head, q_head, local_m * q_stride_m, rows_inside,
        k_head, local_n * k_stride_n, exists, D, CHUNK, False, PRECISION,
    ) * scale  # fmt: skip
    if BIAS != 0:
        bias_head = bias_ptr + b * bias_stride_b + h * bias_stride_h
        bias_head += first_row * bias_stride_m + first_key * bias_stride_n
        bias_offs = local_m[:, None] * bias_stride_m + local_n[None, :] * bias_stride_n
        s += tile_bias(bias_head + bias_offs, rows_inside[:, None] & (keys < Mk)[None, :], BIAS)
    place = (b * H + h) * Mq + queries
    lse = tl.load(lse_ptr + place, mask=rows_inside, other=float("inf"))
    # a row of nothing: exp(−inf + inf) would be NaN, exp(−inf − inf) is 0
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    allowed = allowed_keys(queries, keys, exists, low, high, LEFT, RIGHT)
    allowed = allowed & rows_inside[:, None]
    p = tl.math.exp2((s - lse[:, None]) * LOG2E)
    norm = tl.load(norm_ptr + place, mask=rows_inside, other=1.0)
    delta = tl.load(delta_ptr + place, mask=rows_inside, other=0.0)
    # a gradient that is not finite shows in delta: it spoils the row's weights for every key that
    # the row attends, and no product with the scratch needs to tell excluded keys from others
    spoil = tl.where(tl.abs(delta) < float("inf"), 0.0, float("nan"))
    p = tl.where(allowed, p / norm[:, None] + spoil[:, None], 0.0)
    p_head = local_head.to(tl.int64) * p_stride_h + tile.to(tl.int64) * BLOCK_M * p_stride_m
    p_offs = local_m[:, None] * p_stride_m + local_n[None, :]
    inside = rows_inside[:, None] & (keys < Mk)[None, :]
    p_ptrs = p_ptr + p_head + first_key + p_offs
    tl.store(p_ptrs, (p * p_factor).to(p_ptr.dtype.element_ty), mask=inside)

    grad_head = grad_ptr + b * grad_stride_b + h * grad_stride_h + first_row * grad_stride_m
    v_head = v_ptr + b * v_stride_b + kv_h * v_stride_h + first_key * v_stride_n
    dp = product(
        grad_head, grad_head, local_m * grad_stride_m, rows_inside,
        v_head, local_n * v_stride_n, exists, DV, CHUNK, False, PRECISION,
    )  # fmt: skip
    ds = tl.where(allowed, p * (dp - delta[:, None]), 0.0)
    ds_ptrs = ds_ptr + p_head + first_key + p_offs
    tl.store(ds_ptrs, ds.to(ds_ptr.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize=[
        "item", "b_row", "out_row", "heads", "a_group", "b_group", "N", "C", "mask_stride_b",
    ]
)  # fmt: skip
def attention_wide_sum_kernel(
    a_ptr, b_ptr, mask_ptr, out_ptr, factor,
    a_stride_h, a_stride_m,
    b_stride_b, b_stride_c, b_stride_h,
    out_stride_b, out_stride_n, out_stride_h,
    mask_stride_b, item, b_row, out_row, heads, a_group, b_group, N, C,
    W: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_W: tl.constexpr,
    TRANSPOSED: tl.constexpr, KEY_MASK: tl.constexpr, TAME: tl.constexpr, ADD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out[n, w] = factor · Σ over a_group heads and C columns of a[n, c] · b[c, w].

    a: the scratch, or its transpose. b: rows b_row… of `[B, M, H, W]`; head `head // b_group` where
    a_group is 1, else heads head · a_group…. out: `[B, M, heads, W]` from row out_row on.
    TAME: a b that is not finite counts as 0; weights that attend it are NaN already.
    ADD: adds to what out holds.
    """
    pid = tl.program_id(0)
    strips = tl.cdiv(W, BLOCK_W)
    tiles = tl.cdiv(N, BLOCK_N)
    strip = pid % strips
    tile = (pid // strips) % tiles
    local_head = pid // (strips * tiles)
    local_n = tl.arange(0, BLOCK_N)
    local_c = tl.arange(0, BLOCK_C)
    dims = strip * BLOCK_W + tl.arange(0, BLOCK_W)
    inside_n = tile * BLOCK_N + local_n < N
    b = (item + local_head // heads).to(tl.int64)
    h = (local_head % heads).to(tl.int64)
    mask_head = mask_ptr + b * mask_stride_b

    acc = tl.zeros((BLOCK_N, BLOCK_W), tl.float32)
    for part in range(0, a_group):
        a_head = a_ptr + (local_head.to(tl.int64) * a_group + part) * a_stride_h
        b_head = b_ptr + b * b_stride_b + (h * a_group + part) // b_group * b_stride_h
        for c in range(0, C, BLOCK_C):
            first = tl.full((), 0, tl.int64) + c
            inside_c = keys_that_exist(c, local_c, mask_head, C, KEY_MASK)
            if TRANSPOSED:
                a_ptrs = a_head + first * a_stride_m + tile.to(tl.int64) * BLOCK_N
                a_ptrs += local_c[:, None] * a_stride_m + local_n[None, :]
                mask = inside_c[:, None] & inside_n[None, :]
                x = tl.trans(tl.load(a_ptrs, mask=mask, other=0.0))
            else:
                a_ptrs = a_head + first + tile.to(tl.int64) * BLOCK_N * a_stride_m
                a_ptrs += local_n[:, None] * a_stride_m + local_c[None, :]
                mask = inside_n[:, None] & inside_c[None, :]
                x = tl.load(a_ptrs, mask=mask, other=0.0)
            b_ptrs = b_head + (b_row + first) * b_stride_c
            b_ptrs += local_c[:, None] * b_stride_c + dims[None, :]
            y = tl.load(b_ptrs, mask=inside_c[:, None] & (dims[None, :] < W), other=0.0)
            if TAME:
                y = tl.where(tl.abs(y.to(tl.float32)) < float("inf"), y, tl.zeros_like(y))
            acc = tl.dot(x.to(y.dtype), y, acc, input_precision=PRECISION)
    out_head = out_ptr + b * out_stride_b + h * out_stride_h
    out_head += (out_row + tile.to(tl.int64) * BLOCK_N) * out_stride_n
    out_ptrs = out_head + local_n[:, None] * out_stride_n + dims[None, :]
    inside = inside_n[:, None] & (dims[None, :] < W)
    acc = acc * factor
    if ADD:
        acc += tl.load(out_ptrs, mask=inside, other=0.0)
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=inside)
