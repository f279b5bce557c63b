"""Forward attention: one online-softmax pass over the keys for a tile of queries.

It knows pointers, strides and tiles, and must not choose tiles or judge inputs. Memory is taken as
hostile: int64 before any stride is multiplied, a mask on every edge.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from sdx_kernels import target
from sdx_kernels._triton.attention_launch import (
    LN2,
    LOG2E,
    Bound,
    band_bounds,
    dropout_draw,
    mask_bytes,
    reach,
    run_ladder,
)
from sdx_kernels._triton.attention_parts import band_range, dropout_keep, load_rows
from sdx_kernels.bias import Band, Packed
from sdx_kernels.checks import Dropout
from sdx_kernels.registry import Again
from sdx_kernels.tuning.attention import MAX_AUTOMATIC_FP32_DIM, AttentionConfig, split

__all__ = ["attention_fwd_kernel", "constants_for", "grid_for", "launch_attention_fwd"]


@triton.jit
def _keys_loop(
    acc, acc_2, l_i, m_i, q, q_2, k_head, v_head, bias_head, exists_head,
    k_stride_n, v_stride_n, bias_stride_m, bias_stride_n, exists_stride_n,
    start, end, gap, jump, offs_m, diagonal, left, right, scale, Mq, Mk, seed, place, threshold,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D_2: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_DV_2: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BIAS: tl.constexpr, KEY_MASK: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr,
    DROPOUT: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr, LOG2E: tl.constexpr,
):  # fmt: skip
    """Runs the key tiles start…end; those from `gap` on lie `jump` keys further.

    EDGE tiles test every key against length, key mask and band. Channels come as one power of two
    or as two (then the _2 arguments count).
    """
    BAND: tl.constexpr = LOWER or UPPER
    FULL_D: tl.constexpr = BLOCK_D <= D
    FULL_D_2: tl.constexpr = BLOCK_D + BLOCK_D_2 == D
    FULL_DV: tl.constexpr = BLOCK_DV <= DV
    FULL_DV_2: tl.constexpr = BLOCK_DV + BLOCK_DV_2 == DV
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    k_offs = offs_n[:, None] * k_stride_n + offs_d[None, :]
    v_offs = offs_n[:, None] * v_stride_n + offs_dv[None, :]
    for step in range(start, end, BLOCK_N):
        n = step
        if EDGE and LOWER:
            n = tl.where(step < gap, step, step + jump)
        here = n + offs_n
        # one 64-bit scalar a tile and 32-bit offsets in it: 64-bit offset tensors cost registers
        first = tl.full((), 0, tl.int64) + n
        k_tile = k_head + first * k_stride_n
        v_tile = v_head + first * v_stride_n
        exists = here < Mk
        if KEY_MASK:
            listed = exists_head + first * exists_stride_n + offs_n * exists_stride_n
            exists = exists & (tl.load(listed, mask=exists, other=0) != 0)
        # [BLOCK_N, BLOCK_D]
        k = load_rows(k_tile + k_offs, exists, offs_d, D, FULL_D, EDGE)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if BLOCK_D_2 > 0:
            offs_d_2 = BLOCK_D + tl.arange(0, BLOCK_D_2)
            k_offs_2 = offs_n[:, None] * k_stride_n + offs_d_2[None, :]
            k_2 = load_rows(k_tile + k_offs_2, exists, offs_d_2, D, FULL_D_2, EDGE)
            s = tl.dot(q_2, tl.trans(k_2), s, input_precision=PRECISION)
        s = s * scale
        if BIAS != 0:
            local_m = tl.arange(0, BLOCK_M)
            bias_offs = local_m[:, None] * bias_stride_m + offs_n[None, :] * bias_stride_n
            inside = (offs_m[:, None] < Mq) & (here[None, :] < Mk)
            b = tl.load(bias_head + first * bias_stride_n + bias_offs, mask=inside, other=0)
            if BIAS == 2:
                # added, not selected: NaN of a masked key stays NaN, as in the reference
                s += tl.where(b != 0, 0.0, float("-inf"))
            else:
                s += b.to(tl.float32)
        if EDGE:
            allowed = exists[None, :]
            if LOWER:
                allowed = allowed & (here[None, :] >= (diagonal - left)[:, None])
            if UPPER:
                allowed = allowed & (here[None, :] <= (diagonal + right)[:, None])
            s = tl.where(allowed, s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1))
        reference = m_new
        if BIAS != 0 or BAND or KEY_MASK:
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
        m_i = m_new
        if DROPOUT:
            p = tl.where(dropout_keep(seed, place, offs_m, here, threshold), p, 0.0)
        # [BLOCK_N, BLOCK_DV]
        v = load_rows(v_tile + v_offs, exists, offs_dv, DV, FULL_DV, EDGE)
        if BLOCK_DV_2 > 0:
            offs_dv_2 = BLOCK_DV + tl.arange(0, BLOCK_DV_2)
            v_offs_2 = offs_n[:, None] * v_stride_n + offs_dv_2[None, :]
            v_2 = load_rows(v_tile + v_offs_2, exists, offs_dv_2, DV, FULL_DV_2, EDGE)
        if EDGE and BAND:
            # 0 · NaN is NaN: a key outside the band must not reach rows that exclude it
            tame = tl.abs(v.to(tl.float32)) < float("inf")
            wild = tl.max(tl.where(tame, 0, 1), 1)
            v = tl.where(tame, v, tl.zeros_like(v))
            if BLOCK_DV_2 > 0:
                tame_2 = tl.abs(v_2.to(tl.float32)) < float("inf")
                wild = tl.maximum(wild, tl.max(tl.where(tame_2, 0, 1), 1))
                v_2 = tl.where(tame_2, v_2, tl.zeros_like(v_2))
            hit = tl.max(tl.where(allowed & (wild[None, :] != 0), 1, 0), 1)
            alpha = tl.where(hit != 0, float("nan"), alpha)
        weights = p.to(v.dtype)
        acc = tl.dot(weights, v, acc * alpha[:, None], input_precision=PRECISION)
        if BLOCK_DV_2 > 0:
            acc_2 = tl.dot(weights, v_2, acc_2 * alpha[:, None], input_precision=PRECISION)
    return acc, acc_2, l_i, m_i


# lengths and offsets are never specialised: a new picture size must not compile anything
@triton.jit(
    do_not_specialize=[
        "H", "group", "Mq", "Mk", "longest", "left", "right", "from_end", "threshold",
        "bias_stride_b", "bias_stride_h", "exists_stride_b",
    ]
)  # fmt: skip
def attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, exists_ptr, seed_ptr, query_starts_ptr, key_starts_ptr,
    out_ptr, lse_ptr, scale, rescale,
    q_stride_b, q_stride_m, q_stride_h,
    k_stride_b, k_stride_n, k_stride_h,
    v_stride_b, v_stride_n, v_stride_h,
    bias_stride_b, bias_stride_h, bias_stride_m, bias_stride_n,
    exists_stride_b, exists_stride_n,
    out_stride_b, out_stride_m, out_stride_h,
    H, group, Mq, Mk, longest, left, right, from_end, threshold,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D_2: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_DV_2: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BIAS: tl.constexpr, KEY_MASK: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr,
    PACKED: tl.constexpr, DROPOUT: tl.constexpr, WRITE_LSE: tl.constexpr,
    PRECISION: tl.constexpr, LOG2E: tl.constexpr, LN2: tl.constexpr,
):  # fmt: skip
    """out[b, m, h] = dropped(softmax(scale · q[b, m, h] · k[b, :, h // group]ᵀ + bias)) · v.

    BIAS: 0 none, 1 float, 2 bool as uint8. Without a bias `scale` holds the factor log2(e) already.
    PACKED: b counts sequences, whose rows begin at query_starts and key_starts; `longest` is the
    most queries of one, Mq and Mk those of all. `rescale` is 1 / (1 − p) of dropout.
    Scores, sums and accumulators are fp32; the scale never multiplies a 16-bit value.
    """
    pid = tl.program_id(0)
    tiles = tl.cdiv(longest, BLOCK_M)
    head = pid // tiles
    local_m = tl.arange(0, BLOCK_M)
    tile_m = (pid % tiles) * BLOCK_M
    offs_m = tile_m + local_m
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    b = (head // H).to(tl.int64)
    h = (head % H).to(tl.int64)
    kv_h = h // group
    tile_row = tile_m.to(tl.int64)
    k_head = k_ptr + kv_h * k_stride_h
    v_head = v_ptr + kv_h * v_stride_h
    lse_head = lse_ptr + head.to(tl.int64) * Mq
    if PACKED:
        query_start = tl.load(query_starts_ptr + b).to(tl.int64)
        key_start = tl.load(key_starts_ptr + b).to(tl.int64)
        k_head += key_start * k_stride_n
        v_head += key_start * v_stride_n
        lse_head = lse_ptr + h * Mq + query_start
        Mq = (tl.load(query_starts_ptr + b + 1) - query_start).to(tl.int32)
        Mk = (tl.load(key_starts_ptr + b + 1) - key_start).to(tl.int32)
        # a tile beyond its sequence runs no keys and stores nothing
        Mk = tl.where(tile_m < Mq, Mk, 0)
        q_row = query_start + tile_row
        q_head = q_ptr + h * q_stride_h + q_row * q_stride_m
        out_head = out_ptr + h * out_stride_h + q_row * out_stride_m
    else:
        k_head += b * k_stride_b
        v_head += b * v_stride_b
        q_head = q_ptr + b * q_stride_b + h * q_stride_h + tile_row * q_stride_m
        out_head = out_ptr + b * out_stride_b + h * out_stride_h + tile_row * out_stride_m
    bias_head = bias_ptr + b * bias_stride_b + h * bias_stride_h + tile_row * bias_stride_m
    exists_head = exists_ptr + b * exists_stride_b
    seed = 0
    if DROPOUT:
        seed = tl.load(seed_ptr)

    rows = local_m.to(tl.int64)[:, None]
    inside = offs_m < Mq
    q_ptrs = q_head + rows * q_stride_m
    q = load_rows(q_ptrs + offs_d[None, :], inside, offs_d, D, BLOCK_D <= D, True)
    q_2 = 0
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    acc_2 = 0
    if BLOCK_D_2 > 0:
        offs_d_2 = BLOCK_D + tl.arange(0, BLOCK_D_2)
        q_2 = load_rows(q_ptrs + offs_d_2[None, :], inside, offs_d_2, D, False, True)
    if BLOCK_DV_2 > 0:
        acc_2 = tl.zeros((BLOCK_M, BLOCK_DV_2), tl.float32)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    shift = from_end * (Mk - Mq)
    last = tl.minimum(tile_m + BLOCK_M, Mq) - 1
    begin, inner, inner_end, end = band_range(
        tile_m, last, Mk, shift, left, right, LOWER, UPPER, BLOCK_N
    )
    if KEY_MASK:
        # any tile may lack a key
        inner_end = inner
    else:
        acc, acc_2, l_i, m_i = _keys_loop(
            acc, acc_2, l_i, m_i, q, q_2, k_head, v_head, bias_head, exists_head,
            k_stride_n, v_stride_n, bias_stride_m, bias_stride_n, exists_stride_n,
            inner, inner_end, 0, 0, offs_m, offs_m + shift, left, right, scale, Mq, Mk,
            seed, head, threshold, D, DV, BLOCK_D, BLOCK_D_2, BLOCK_DV, BLOCK_DV_2,
            BLOCK_M, BLOCK_N, BIAS, KEY_MASK, LOWER, UPPER, DROPOUT, False, PRECISION, LOG2E,
        )  # fmt: skip
    # the tiles before the whole ones and those after them, in one loop
    jump = inner_end - inner
    start = begin
    if not LOWER:
        start = inner_end
        jump = 0
    acc, acc_2, l_i, m_i = _keys_loop(
        acc, acc_2, l_i, m_i, q, q_2, k_head, v_head, bias_head, exists_head,
        k_stride_n, v_stride_n, bias_stride_m, bias_stride_n, exists_stride_n,
        start, end - jump, inner, jump, offs_m, offs_m + shift, left, right, scale, Mq, Mk,
        seed, head, threshold, D, DV, BLOCK_D, BLOCK_D_2, BLOCK_DV, BLOCK_DV_2,
        BLOCK_M, BLOCK_N, BIAS, KEY_MASK, LOWER, UPPER, DROPOUT, True, PRECISION, LOG2E,
    )  # fmt: skip

    # a row with nothing to attend has l = 0 and acc = 0, and gives exactly 0
    out = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    if DROPOUT:
        out = out * rescale
    out_ptrs = out_head + rows * out_stride_m
    kept = inside[:, None] & (offs_dv[None, :] < DV)
    tl.store(out_ptrs + offs_dv[None, :], out.to(out_ptr.dtype.element_ty), mask=kept)
    if BLOCK_DV_2 > 0:
        offs_dv_2 = BLOCK_DV + tl.arange(0, BLOCK_DV_2)
        out_2 = acc_2 / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
        if DROPOUT:
            out_2 = out_2 * rescale
        kept_2 = inside[:, None] & (offs_dv_2[None, :] < DV)
        tl.store(out_ptrs + offs_dv_2[None, :], out_2.to(out_ptr.dtype.element_ty), mask=kept_2)
    if WRITE_LSE:
        # m is -inf where l is 0, and log2(1) leaves it so
        log2_l = tl.math.log2(tl.where(l_i == 0.0, 1.0, l_i))
        lse = m_i + log2_l * LN2 if BIAS != 0 else (m_i + log2_l) * LN2
        tl.store(lse_head + offs_m, lse, mask=inside)


def grid_for(items: int, heads: int, queries: int, block_m: int) -> tuple[int, int, int]:
    """Launch grid: everything on x (limit 2³¹ − 1), since y and z end at 65,535.

    Args:
        items: batch items, or packed sequences. heads: of the query.
        queries: of an item, or of the longest sequence. block_m: query rows a tile.
    """
    return items * heads * -(-queries // block_m), 1, 1


def constants_for(
    config: AttentionConfig,
    *,
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    bias: torch.dtype | None,
    with_lse: bool,
    key_mask: bool = False,
    lower: bool = False,
    upper: bool = False,
    packed: bool = False,
    dropout: bool = False,
) -> dict[str, object]:
    """The kernel's compile-time arguments; also what the ahead-of-time check compiles.

    Args:
        config: the launch.
        head_dim, value_dim, dtype, bias: K, Kv, the inputs' dtype and the bias's (None = none).
        with_lse, key_mask, packed, dropout: whether there is one.
        lower, upper: which bounds the band has.
    """
    block_d, block_d_2 = split(head_dim, dtype.itemsize)
    block_dv, block_dv_2 = split(value_dim, dtype.itemsize)
    return {
        "D": head_dim,
        "DV": value_dim,
        "BLOCK_D": block_d,
        "BLOCK_D_2": block_d_2,
        "BLOCK_DV": block_dv,
        "BLOCK_DV_2": block_dv_2,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BIAS": 0 if bias is None else 2 if bias == torch.bool else 1,
        "KEY_MASK": key_mask,
        "LOWER": lower,
        "UPPER": upper,
        "PACKED": packed,
        "DROPOUT": dropout,
        "WRITE_LSE": with_lse,
        # three tf32 products keep fp32's accuracy on tensor cores, plain tf32 loses 13 bits; over
        # sums of 256 even three lose too much (1.72e-6 where 1.65e-6 is allowed, H200)
        "PRECISION": (
            "tf32x3"
            if dtype == torch.float32 and max(head_dim, value_dim) <= MAX_AUTOMATIC_FP32_DIM
            else "ieee"
        ),
        "LOG2E": LOG2E,
        "LN2": LN2,
    }


def launch_attention_fwd(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    scale: float,
    key_mask: torch.Tensor | None = None,
    band: Band | None = None,
    packed: Packed | None = None,
    dropout: Dropout | None = None,
    output_dtype: torch.dtype,
    with_lse: bool,
    ladder: tuple[AttentionConfig, ...],
    bind: Callable[[Again], None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Runs the kernel on BMHK tensors of one dtype with a contiguous last dim.

    Args:
        query: `[B, Mq, H, K]`. key: `[B, Mk, Hk, K]`. value: `[B, Mk, Hk, Kv]`; any strides.
        bias: float or bool, broadcastable to `[B, H, Mq, Mk]`; read through its strides.
        scale: factor of the scores.
        key_mask: bool `[B, Mk]`, True = the key exists; others are never read.
        band: keys around each query's diagonal; others are as if absent. None = all.
        packed: where the sequences of a batch of one begin; without `bias` and `key_mask`.
        dropout: which weights are dropped.
        output_dtype: dtype of the output.
        with_lse: also write the rows' log-sum-exp (of the softmax before dropout).
        ladder: launch configurations, best first.
        bind: gets what does it again; not with packed sequences, dropout or lse, nor where a
            tensor was copied on the way.

    Returns:
        `[B, Mq, H, Kv]` contiguous, and `[B, H, Mq]` fp32 or None. Rows that attend nothing hold
        0 and −inf.

    Raises:
        LaunchRefused: the driver has too few resources for every configuration.
    """
    given = (key, value, bias, key_mask)
    # queries are read once, through 64-bit offsets of their rows
    key, value = reach(key, 1), reach(value, 1)
    batch, queries, heads, head_dim = query.shape
    keys, key_heads, value_dim = key.shape[1], key.shape[2], value.shape[3]
    out = torch.empty((batch, queries, heads, value_dim), dtype=output_dtype, device=query.device)
    lse = (
        torch.empty((batch, heads, queries), dtype=torch.float32, device=query.device)
        if with_lse
        else None
    )
    items, longest, longest_key = batch, queries, keys
    if packed is not None:
        items = packed.query_starts.shape[0] - 1
        longest, longest_key = packed.longest_query, packed.longest_key
    if items * heads * longest == 0:
        return out, lse
    kinds: dict[str, Any] = {
        "head_dim": head_dim,
        "value_dim": value_dim,
        "dtype": query.dtype,
        "bias": None if bias is None else bias.dtype,
        "with_lse": with_lse,
        "key_mask": key_mask is not None,
        "lower": band is not None and band.left is not None,
        "upper": band is not None and band.right is not None,
        "packed": packed is not None,
        "dropout": dropout is not None,
    }
    bias_strides: tuple[int, ...] = (0, 0, 0, 0)
    if bias is not None:
        bias = reach(bias, 2, 3)
        bias_strides = bias.expand(batch, heads, queries, keys).stride()
    exists_strides: tuple[int, ...] = (0, 0)
    if key_mask is not None:
        key_mask = reach(key_mask, 1)
        exists_strides = key_mask.stride()
    as_given = all(a is b for a, b in zip(given, (key, value, bias, key_mask), strict=True))
    repeats = as_given and not (with_lse or packed or dropout) and output_dtype == query.dtype
    threshold, rescale = dropout_draw(dropout)
    kernel: Any = attention_fwd_kernel

    def launch(config: AttentionConfig) -> None:
        grid = grid_for(items, heads, longest, config.block_m)
        constants = constants_for(config, **kinds)
        fixed = (
            *query.stride()[:3],
            *key.stride()[:3],
            *value.stride()[:3],
            *bias_strides,
            *exists_strides,
            *out.stride()[:3],
            heads,
            heads // key_heads,
            queries,
            keys,
            longest,
            *band_bounds(band, longest + longest_key),
            threshold,
        )
        compiled = kernel[grid](
            query,
            key,
            value,
            query if bias is None else mask_bytes(bias),
            query if key_mask is None else mask_bytes(key_mask),
            query if dropout is None else dropout.seed,
            query if packed is None else packed.query_starts,
            query if packed is None else packed.key_starts,
            out,
            out if lse is None else lse,
            scale if bias is not None else scale * LOG2E,
            rescale,
            *fixed,
            **constants,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            enable_fp_fusion=True,
        )
        if bind is not None and repeats and compiled is not None:
            bound = Bound(compiled, kernel, grid, fixed, constants)
            bind(bound.with_masks(out.shape, bias is not None, unused=3, after=(1.0,)))

    step_key = (kernel, target.of(query.device), *kinds.values(), ladder)
    on_device = torch.cuda.device(query.device) if query.is_cuda else contextlib.nullcontext()
    with on_device:
        run_ladder(step_key, ladder, launch)
    return out, lse
