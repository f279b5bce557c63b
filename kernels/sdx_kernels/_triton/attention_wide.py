"""Forward attention of wide heads (257…512 dims, fp32 from 129), in two passes or in one.

Two passes: tiles of weights go into a scratch, then a product with the values reads it; at 512 dims
a weight costs 2,048 operations and 4 bytes of traffic. One pass needs no scratch, but 512 value
dims fill a multiprocessor's registers with 64 rows.
It knows pointers, strides and tiles, and must not choose tiles, slices or judge inputs.
"""

import triton
import triton.language as tl

__all__ = [
    "allowed_keys",
    "attention_wide_fwd_kernel",
    "attention_wide_mix_kernel",
    "attention_wide_scores_kernel",
    "attention_wide_tops_kernel",
    "keys_that_exist",
    "load_rows",
    "product",
    "tile_bias",
]


@triton.jit
def load_rows(head, offs, inside, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """[rows, BLOCK] of dims first…first + BLOCK; zeros where a row or a dim does not exist.

    head: pointer to dim 0 of the tile's first row. offs: int32 `[rows]`, each row's distance to it.
    """
    dims = first + tl.arange(0, BLOCK)
    mask = inside[:, None]
    if WIDTH % BLOCK != 0:
        mask = mask & (dims[None, :] < WIDTH)
    return tl.load(head + (offs[:, None] + dims[None, :]), mask=mask, other=0.0)


@triton.jit
def product(
    whole, a_head, a_offs, a_inside, b_head, b_offs, b_inside,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """a · bᵀ in fp32, [rows of a, rows of b], over WIDTH dims.

    WHOLE: `whole` is a's tile, loaded once and CHUNK wide; else both are read chunk by chunk.
    """
    if WHOLE:
        b = load_rows(b_head, b_offs, b_inside, 0, WIDTH, CHUNK)
        return tl.dot(whole, tl.trans(b), input_precision=PRECISION)
    s = tl.zeros((a_offs.shape[0], b_offs.shape[0]), tl.float32)
    for first in range(0, WIDTH, CHUNK):
        a = load_rows(a_head, a_offs, a_inside, first, WIDTH, CHUNK)
        b = load_rows(b_head, b_offs, b_inside, first, WIDTH, CHUNK)
        s = tl.dot(a, tl.trans(b), s, input_precision=PRECISION)
    return s


@triton.jit
def keys_that_exist(n, local_n, mask_head, Mk, KEY_MASK: tl.constexpr):
    """Bool [BLOCK_N]: which keys of the tile at n are within the length and the key mask."""
    inside = n + local_n < Mk
    if KEY_MASK:
        inside = inside & (tl.load(mask_head + n + local_n, mask=inside, other=0) != 0)
    return inside


@triton.jit
def allowed_keys(
    rows, keys, keys_inside, low, high, LEFT: tl.constexpr, RIGHT: tl.constexpr
):  # fmt: skip
    """Bool [rows, keys] or [1, keys]: whether a row may attend a key that exists.

    Row i attends keys i + low … i + high; which of the two bounds hold is LEFT and RIGHT.
    """
    allowed = keys_inside[None, :]
    if LEFT:
        allowed = allowed & (keys[None, :] >= rows[:, None] + low)
    if RIGHT:
        allowed = allowed & (keys[None, :] <= rows[:, None] + high)
    return allowed


@triton.jit
def tile_bias(ptrs, inside, BIAS: tl.constexpr):
    """fp32 tile of a dense bias; BIAS: 1 float, 2 bool as uint8 (0 where True, −inf where not)."""
    b = tl.load(ptrs, mask=inside, other=0)
    if BIAS == 2:
        return tl.where(b != 0, 0.0, float("-inf"))
    return b.to(tl.float32)


# lengths and offsets are never specialised: a new picture size must not compile anything
@triton.jit(
    do_not_specialize=[
        "H", "group", "Mq", "Mk", "low", "high", "mask_stride_b", "bias_stride_b", "bias_stride_h",
    ]
)  # fmt: skip
def attention_wide_fwd_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, mask_ptr, out_ptr, lse_ptr, scale,
    q_stride_b, q_stride_m, q_stride_h,
    k_stride_b, k_stride_n, k_stride_h,
    v_stride_b, v_stride_n, v_stride_h,
    bias_stride_b, bias_stride_h, bias_stride_m, bias_stride_n,
    out_stride_b, out_stride_m, out_stride_h,
    mask_stride_b, H, group, Mq, Mk, low, high,
    D: tl.constexpr, DV: tl.constexpr, CHUNK: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_DV: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BIAS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, KEY_MASK: tl.constexpr,
    WRITE_LSE: tl.constexpr, PRECISION: tl.constexpr, LOG2E: tl.constexpr, LN2: tl.constexpr,
):  # fmt: skip
    """out[b, m, h] = softmax(scale · q[b, m, h] · k[b, :, h // group]ᵀ + bias) · v.

    One program holds BLOCK_DV of the value dims for BLOCK_M rows; SPLITS of them share the rows
    and each computes the scores anew.
    BIAS: 0 none, 1 float, 2 bool as uint8. Without a bias `scale` holds the factor log2(e) already.
    Scores, sums and accumulator are fp32; the scale never multiplies a 16-bit value.
    """
    MASKED: tl.constexpr = LEFT or RIGHT or KEY_MASK
    pid = tl.program_id(0)
    split = pid % SPLITS
    pid = pid // SPLITS
    tiles = tl.cdiv(Mq, BLOCK_M)
    head = pid // tiles
    tile = pid % tiles
    local_m = tl.arange(0, BLOCK_M)
    local_n = tl.arange(0, BLOCK_N)
    rows = tile * BLOCK_M + local_m
    rows_inside = rows < Mq
    first_dv = split * BLOCK_DV
    b = (head // H).to(tl.int64)
    h = (head % H).to(tl.int64)
    kv_h = h // group
    tile_row = tile.to(tl.int64) * BLOCK_M

    q_head = q_ptr + b * q_stride_b + h * q_stride_h + tile_row * q_stride_m
    q_offs = local_m * q_stride_m
    k_head = k_ptr + b * k_stride_b + kv_h * k_stride_h
    k_offs = local_n * k_stride_n
    v_head = v_ptr + b * v_stride_b + kv_h * v_stride_h + first_dv
    v_offs = local_n * v_stride_n
    mask_head = mask_ptr + b * mask_stride_b
    bias_head = bias_ptr + b * bias_stride_b + h * bias_stride_h + tile_row * bias_stride_m
    bias_offs = local_m[:, None] * bias_stride_m + local_n[None, :] * bias_stride_n
    dv_dims = tl.arange(0, BLOCK_DV)
    dv_inside = first_dv + dv_dims < DV

    whole = q_head
    if WHOLE:
        whole = load_rows(q_head, q_offs, rows_inside, 0, D, CHUNK)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    # tiles before `start` and from `end` on are read by no row of this tile
    start = 0
    end = Mk
    if LEFT:
        start = tl.maximum(0, tile * BLOCK_M + low) // BLOCK_N * BLOCK_N
    if RIGHT:
        end = tl.maximum(0, tl.minimum(Mk, tile * BLOCK_M + BLOCK_M + high))
    for n in range(start, end, BLOCK_N):
        keys = n + local_n
        # one 64-bit scalar a tile and 32-bit offsets in it: 64-bit offset tensors cost registers
        first = tl.full((), 0, tl.int64) + n
        keys_inside = keys_that_exist(n, local_n, mask_head, Mk, KEY_MASK)
        s = product(
            whole, q_head, q_offs, rows_inside, k_head + first * k_stride_n, k_offs, keys_inside,
            D, CHUNK, WHOLE, PRECISION,
        ) * scale  # fmt: skip
        if BIAS != 0:
            inside = rows_inside[:, None] & (keys < Mk)[None, :]
            # added, not selected: NaN of a masked key stays NaN, as in the reference
            s += tile_bias(bias_head + first * bias_stride_n + bias_offs, inside, BIAS)
        allowed = allowed_keys(rows, keys, keys_inside, low, high, LEFT, RIGHT)
        s = tl.where(allowed, s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1))
        reference = m_new
        if BIAS != 0 or MASKED:
            # a row that has attended nothing yet: −inf − −inf would be NaN
            reference = tl.where(m_new == float("-inf"), 0.0, m_new)
        if BIAS != 0:
            # the factor comes after the subtraction: finfo(fp32).min · log2(e) would be −inf
            p = tl.math.exp2((s - reference[:, None]) * LOG2E)
            alpha = tl.math.exp2((m_i - reference) * LOG2E)
        else:
            p = tl.math.exp2(s - reference[:, None])
            alpha = tl.math.exp2(m_i - reference)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        # [BLOCK_N, BLOCK_DV]
        v_ptrs = v_head + first * v_stride_n + (v_offs[:, None] + dv_dims[None, :])
        if DV == SPLITS * BLOCK_DV:
            v = tl.load(v_ptrs, mask=keys_inside[:, None], other=0.0)
        else:
            v = tl.load(v_ptrs, mask=keys_inside[:, None] & dv_inside[None, :], other=0.0)
        if LEFT or RIGHT:
            # 0 · NaN is NaN: a key beyond the band must not reach rows that exclude it
            tame = tl.abs(v.to(tl.float32)) < float("inf")
            wild = tl.max(tl.where(tame, 0, 1), 1)
            v = tl.where(tame, v, tl.zeros_like(v))
            hit = tl.max(tl.where(allowed & (wild[None, :] != 0), 1, 0), 1)
            l_i = tl.where(hit != 0, float("nan"), l_i)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        m_i = m_new

    # a row with nothing to attend has l = 0 and acc = 0, and gives exactly 0
    out = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    out_head = out_ptr + b * out_stride_b + h * out_stride_h + tile_row * out_stride_m + first_dv
    out_ptrs = out_head + (local_m[:, None] * out_stride_m + dv_dims[None, :])
    inside = rows_inside[:, None] & dv_inside[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=inside)
    if WRITE_LSE:
        # m is -inf where l is 0, and log2(1) leaves it so
        log2_l = tl.math.log2(tl.where(l_i == 0.0, 1.0, l_i))
        lse = m_i + log2_l * LN2 if BIAS != 0 else (m_i + log2_l) * LN2
        lse_ptrs = lse_ptr + head.to(tl.int64) * Mq + rows
        tl.store(lse_ptrs, lse, mask=rows_inside & (split == 0))


@triton.jit(
    do_not_specialize=[
        "item", "row", "rows", "H", "group", "Mq", "Mk", "low", "high",
        "mask_stride_b", "bias_stride_b", "bias_stride_h",
    ]
)  # fmt: skip
def attention_wide_scores_kernel(
    q_ptr, k_ptr, bias_ptr, mask_ptr, p_ptr, top_ptr, sum_ptr, scale,
    q_stride_b, q_stride_m, q_stride_h,
    k_stride_b, k_stride_n, k_stride_h,
    bias_stride_b, bias_stride_h, bias_stride_m, bias_stride_n,
    p_stride_h, p_stride_m,
    mask_stride_b, item, row, rows, H, group, Mq, Mk, low, high,
    D: tl.constexpr, CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BIAS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, KEY_MASK: tl.constexpr,
    PRECISION: tl.constexpr, LOG2E: tl.constexpr,
):  # fmt: skip
    """One tile of p = exp(score − top) into the scratch, with each row's top and sum in the tile.

    A launch covers rows row…row + rows of every head of the items from `item` on; the scratch
    counts both from there. top and sum: fp32 `[heads, key tiles, rows]`; scale and top as in
    `attention_wide_fwd_kernel` (log2 units without a bias).
    """
    pid = tl.program_id(0)
    tiles = tl.cdiv(rows, BLOCK_M)
    key_tiles = tl.cdiv(Mk, BLOCK_N)
    tile = pid % tiles
    key_tile = (pid // tiles) % key_tiles
    local_head = pid // (tiles * key_tiles)
    local_m = tl.arange(0, BLOCK_M)
    local_n = tl.arange(0, BLOCK_N)
    scratch_rows = tile * BLOCK_M + local_m
    rows_inside = scratch_rows < rows
    keys = key_tile * BLOCK_N + local_n
    b = (item + local_head // H).to(tl.int64)
    h = (local_head % H).to(tl.int64)
    first_row = row + tile.to(tl.int64) * BLOCK_M
    first_key = key_tile.to(tl.int64) * BLOCK_N
    mask_head = mask_ptr + b * mask_stride_b
    exists = keys_that_exist(key_tile * BLOCK_N, local_n, mask_head, Mk, KEY_MASK)

    q_head = q_ptr + b * q_stride_b + h * q_stride_h + first_row * q_stride_m
    k_head = k_ptr + b * k_stride_b + h // group * k_stride_h + first_key * k_stride_n
    s = product(
        q_head, q_head, local_m * q_stride_m, rows_inside,
        k_head, local_n * k_stride_n, exists, D, CHUNK, False, PRECISION,
    ) * scale  # fmt: skip
    inside = rows_inside[:, None] & (keys < Mk)[None, :]
    if BIAS != 0:
        bias_head = bias_ptr + b * bias_stride_b + h * bias_stride_h
        bias_head += first_row * bias_stride_m + first_key * bias_stride_n
        bias_offs = local_m[:, None] * bias_stride_m + local_n[None, :] * bias_stride_n
        s += tile_bias(bias_head + bias_offs, inside, BIAS)
    allowed = allowed_keys(row + scratch_rows, keys, exists, low, high, LEFT, RIGHT)
    s = tl.where(allowed, s, float("-inf"))
    top = tl.max(s, 1)
    reference = tl.where(top == float("-inf"), 0.0, top)
    if BIAS != 0:
        p = tl.math.exp2((s - reference[:, None]) * LOG2E)
    else:
        p = tl.math.exp2(s - reference[:, None])
    place = (local_head.to(tl.int64) * key_tiles + key_tile) * rows + scratch_rows
    tl.store(top_ptr + place, top, mask=rows_inside)
    tl.store(sum_ptr + place, tl.sum(p, 1), mask=rows_inside)
    p_head = p_ptr + local_head.to(tl.int64) * p_stride_h + first_key
    p_head += tile.to(tl.int64) * BLOCK_M * p_stride_m
    p_ptrs = p_head + (local_m[:, None] * p_stride_m + local_n[None, :])
    tl.store(p_ptrs, p.to(p_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["item", "row", "rows", "H", "Mq", "key_tiles"])
def attention_wide_tops_kernel(
    top_ptr, sum_ptr, total_ptr, lse_ptr, item, row, rows, H, Mq, key_tiles,
    BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr,
    BIAS: tl.constexpr, WRITE_LSE: tl.constexpr, LOG2E: tl.constexpr, LN2: tl.constexpr,
):  # fmt: skip
    """Turns each tile's top into the factor exp(top − the row's top), and sums the row.

    total: fp32 `[heads, rows]`.
    """
    FACTOR: tl.constexpr = LOG2E if BIAS != 0 else 1.0  # type: ignore[assignment]
    pid = tl.program_id(0)
    tiles = tl.cdiv(rows, BLOCK_M)
    local_head = pid // tiles
    m = (pid % tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    t = tl.arange(0, BLOCK_T)
    head = local_head.to(tl.int64) * key_tiles * rows
    row_top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    for first in range(0, key_tiles, BLOCK_T):
        inside = (first + t < key_tiles)[:, None] & (m < rows)[None, :]
        place = head + (first + t).to(tl.int64)[:, None] * rows + m[None, :]
        top = tl.load(top_ptr + place, mask=inside, other=float("-inf"))
        row_top = tl.maximum(row_top, tl.max(top, 0))
    reference = tl.where(row_top == float("-inf"), 0.0, row_top)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for first in range(0, key_tiles, BLOCK_T):
        inside = (first + t < key_tiles)[:, None] & (m < rows)[None, :]
        place = head + (first + t).to(tl.int64)[:, None] * rows + m[None, :]
        top = tl.load(top_ptr + place, mask=inside, other=float("-inf"))
        factor = tl.math.exp2((top - reference[None, :]) * FACTOR)
        total += tl.sum(factor * tl.load(sum_ptr + place, mask=inside, other=0.0), 0)
        tl.store(top_ptr + place, factor, mask=inside)
    tl.store(total_ptr + local_head.to(tl.int64) * rows + m, total, mask=m < rows)
    if WRITE_LSE:
        log2_l = tl.math.log2(tl.where(total == 0.0, 1.0, total))
        lse = row_top + log2_l * LN2 if BIAS != 0 else (row_top + log2_l) * LN2
        lse_head = lse_ptr + (item * H + local_head).to(tl.int64) * Mq + row
        tl.store(lse_head + m, lse, mask=m < rows)


@triton.jit(
    do_not_specialize=["item", "row", "rows", "H", "group", "Mk", "low", "high", "mask_stride_b"]
)
def attention_wide_mix_kernel(
    p_ptr, factor_ptr, total_ptr, v_ptr, mask_ptr, out_ptr,
    p_stride_h, p_stride_m,
    v_stride_b, v_stride_n, v_stride_h,
    out_stride_b, out_stride_m, out_stride_h,
    mask_stride_b, item, row, rows, H, group, Mk, low, high,
    DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_DV: tl.constexpr,
    TILE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, KEY_MASK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out = Σ over keys of p · factor · v / total, from the scratch of a slice.

    TILE: keys of a score tile, whose rows share a factor; a multiple of BLOCK_C.
    """
    pid = tl.program_id(0)
    strips = tl.cdiv(DV, BLOCK_DV)
    tiles = tl.cdiv(rows, BLOCK_M)
    strip = pid % strips
    tile = (pid // strips) % tiles
    local_head = pid // (strips * tiles)
    local_m = tl.arange(0, BLOCK_M)
    local_c = tl.arange(0, BLOCK_C)
    scratch_rows = tile * BLOCK_M + local_m
    rows_inside = scratch_rows < rows
    dims = strip * BLOCK_DV + tl.arange(0, BLOCK_DV)
    b = (item + local_head // H).to(tl.int64)
    h = (local_head % H).to(tl.int64)
    mask_head = mask_ptr + b * mask_stride_b
    p_head = p_ptr + local_head.to(tl.int64) * p_stride_h
    p_head += tile.to(tl.int64) * BLOCK_M * p_stride_m
    p_offs = local_m[:, None] * p_stride_m + local_c[None, :]
    v_head = v_ptr + b * v_stride_b + h // group * v_stride_h
    v_offs = local_c[:, None] * v_stride_n + dims[None, :]
    factor_head = factor_ptr + local_head.to(tl.int64) * tl.cdiv(Mk, TILE) * rows
    total = tl.load(
        total_ptr + local_head.to(tl.int64) * rows + scratch_rows, mask=rows_inside, other=1.0
    )

    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    for c in range(0, Mk, BLOCK_C):
        first = tl.full((), 0, tl.int64) + c
        exists = keys_that_exist(c, local_c, mask_head, Mk, KEY_MASK)
        inside = rows_inside[:, None] & (c + local_c < Mk)[None, :]
        p = tl.load(p_head + first + p_offs, mask=inside, other=0.0)
        factor = tl.load(
            factor_head + first // TILE * rows + scratch_rows, mask=rows_inside, other=0.0
        )
        p = p.to(tl.float32) * factor[:, None]
        v_ptrs = v_head + first * v_stride_n + v_offs
        v = tl.load(v_ptrs, mask=exists[:, None] & (dims[None, :] < DV), other=0.0)
        if LEFT or RIGHT:
            # 0 · NaN is NaN: a key beyond the band must not reach rows that exclude it
            tame = tl.abs(v.to(tl.float32)) < float("inf")
            wild = tl.max(tl.where(tame, 0, 1), 1)
            v = tl.where(tame, v, tl.zeros_like(v))
            keys = c + local_c
            allowed = allowed_keys(row + scratch_rows, keys, exists, low, high, LEFT, RIGHT)
            hit = tl.max(tl.where(allowed & (wild[None, :] != 0), 1, 0), 1)
            total = tl.where(hit != 0, float("nan"), total)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    # a row with nothing to attend has a total of 0, and gives exactly 0
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out_head = out_ptr + b * out_stride_b + h * out_stride_h
    out_head += (row + tile.to(tl.int64) * BLOCK_M) * out_stride_m
    out_ptrs = out_head + (local_m[:, None] * out_stride_m + dims[None, :])
    inside = rows_inside[:, None] & (dims[None, :] < DV)
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=inside)
