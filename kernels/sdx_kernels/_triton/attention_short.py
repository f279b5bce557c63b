"""Forward attention over few keys: a program holds them all and walks over query tiles.

With every score of a row at hand the softmax is the plain one: one maximum, one sum, no rescale.
It knows pointers, strides and tiles, and must not choose tiles or judge inputs.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.compiler import ASTSource

from sdx_kernels import target
from sdx_kernels._triton.attention_launch import Bound, mask_bytes, reach, run_ladder
from sdx_kernels.registry import Again
from sdx_kernels.tuning.attention import AttentionConfig, padded
from sdx_kernels.tuning.attention_short import ShortConfig, parts_for

__all__ = [
    "attention_short_kernel",
    "constants_for_short",
    "launch_attention_short",
    "short_source",
]

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453


@triton.jit
def _held(
    head, stride_n, mask_row, mask_stride_n, offs_n, offs_d, Mk,
    D: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """([keys, dims] tile, which of the keys exist); what does not exist is never read."""
    live = offs_n < Mk
    if MASK:
        live = live & (tl.load(mask_row + offs_n * mask_stride_n, mask=live, other=0) != 0)
    # 64-bit offsets: this happens once a program, so that registers do not matter
    ptrs = head + offs_n.to(tl.int64)[:, None] * stride_n + offs_d[None, :]
    return tl.load(ptrs, mask=live[:, None] & (offs_d[None, :] < D), other=0.0), live


@triton.jit
def _scores(
    q, k, live, bias_tile, offs_m, offs_n, bias_stride_m, bias_stride_n, local_m, scale, Mq, Mk,
    BIAS: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, keys] in fp32, in log2 units without a bias; −inf where no key exists."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if BIAS != 0:
        inside = (offs_m[:, None] < Mq) & (offs_n[None, :] < Mk)
        ptrs = bias_tile + local_m[:, None] * bias_stride_m + offs_n[None, :] * bias_stride_n
        b = tl.load(ptrs, mask=inside, other=0)
        if BIAS == 2:
            # added, not selected: NaN of a masked key stays NaN, as in the reference
            s += tl.where(b != 0, 0.0, float("-inf"))
        else:
            s += b.to(tl.float32)
    if EDGE:
        s = tl.where(live[None, :], s, float("-inf"))
    return s


@triton.jit
def _query_tile(
    tile, q_head, bias_head, out_head, lse_head, k, k2, v, v2, live, live2,
    q_stride_m, out_stride_m, bias_stride_m, bias_stride_n, scale, Mq, Mk,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    REST: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr, WRITE_LSE: tl.constexpr,
    PRECISION: tl.constexpr, LOG2E: tl.constexpr, LN2: tl.constexpr,
):  # fmt: skip
    """Query rows tile · BLOCK_M … of one head, from load to store."""
    BLOCK_D: tl.constexpr = k.shape[1]
    BLOCK_DV: tl.constexpr = v.shape[1]
    local_m = tl.arange(0, BLOCK_M)
    offs_m = tile * BLOCK_M + local_m
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    offs_n = tl.arange(0, BLOCK_N)
    row = tl.full((), 0, tl.int64) + tile * BLOCK_M
    q_ptrs = q_head + row * q_stride_m + local_m[:, None] * q_stride_m + offs_d[None, :]
    q = tl.load(q_ptrs, mask=(offs_m[:, None] < Mq) & (offs_d[None, :] < D), other=0.0)
    bias_tile = bias_head + row * bias_stride_m
    # with a second segment the first one is full, unless a mask has holes
    s = _scores(
        q, k, live, bias_tile, offs_m, offs_n, bias_stride_m, bias_stride_n, local_m, scale,
        Mq, Mk, BIAS, MASK or REST == 0, PRECISION,
    )  # fmt: skip
    m = tl.max(s, 1)
    if REST != 0:
        s2 = _scores(
            q, k2, live2, bias_tile, offs_m, BLOCK_N + tl.arange(0, REST), bias_stride_m,
            bias_stride_n, local_m, scale, Mq, Mk, BIAS, True, PRECISION,
        )  # fmt: skip
        m = tl.maximum(m, tl.max(s2, 1))
    # a row that attends nothing: −inf − −inf would be NaN
    reference = tl.where(m == float("-inf"), 0.0, m)[:, None]
    # with a bias the factor comes after the subtraction: finfo(fp32).min · log2(e) would be −inf
    p = tl.math.exp2((s - reference) * LOG2E) if BIAS != 0 else tl.math.exp2(s - reference)
    total = tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
    if REST != 0:
        p2 = tl.math.exp2((s2 - reference) * LOG2E) if BIAS != 0 else tl.math.exp2(s2 - reference)
        total += tl.sum(p2, 1)
        acc = tl.dot(p2.to(v.dtype), v2, acc, input_precision=PRECISION)
    safe = tl.where(total == 0.0, 1.0, total)
    out = acc / safe[:, None]
    out_ptrs = out_head + row * out_stride_m + local_m[:, None] * out_stride_m + offs_dv[None, :]
    inside = (offs_m[:, None] < Mq) & (offs_dv[None, :] < DV)
    tl.store(out_ptrs, out.to(out_head.dtype.element_ty), mask=inside)
    if WRITE_LSE:
        # m is −inf where the sum is 0, and log2(1) leaves it so
        log2_l = tl.math.log2(safe)
        lse = m + log2_l * LN2 if BIAS != 0 else (m + log2_l) * LN2
        tl.store(lse_head + offs_m, lse, mask=offs_m < Mq)


# neither lengths nor strides are specialised: a new picture size or model compiles nothing. What
# vector loads need of the strides, ALIGN tells; only a bias may be dense in its last dim.
@triton.jit(
    do_not_specialize=[
        "q_stride_b", "q_stride_m", "q_stride_h", "k_stride_b", "k_stride_n", "k_stride_h",
        "v_stride_b", "v_stride_n", "v_stride_h", "bias_stride_b", "bias_stride_h",
        "mask_stride_b", "mask_stride_n", "H", "group", "Mq", "Mk", "parts",
    ]
)  # fmt: skip
def attention_short_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, mask_ptr, out_ptr, lse_ptr, scale,
    q_stride_b, q_stride_m, q_stride_h,
    k_stride_b, k_stride_n, k_stride_h,
    v_stride_b, v_stride_n, v_stride_h,
    bias_stride_b, bias_stride_h, bias_stride_m, bias_stride_n,
    mask_stride_b, mask_stride_n,
    H, group, Mq, Mk, parts,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, REST: tl.constexpr, LOOP: tl.constexpr,
    BIAS: tl.constexpr, MASK: tl.constexpr, WRITE_LSE: tl.constexpr, ALIGN: tl.constexpr,
    PRECISION: tl.constexpr, LOG2E: tl.constexpr, LN2: tl.constexpr,
):  # fmt: skip
    """out[b, m, h] = softmax(scale · q[b, m, h] · k[b, :, h // group]ᵀ + bias) · v, Mk small.

    BIAS: 0 none, 1 float, 2 bool as uint8. Without a bias `scale` holds the factor log2(e) already.
    Strides of q, k and v count ALIGN elements, so that 16-byte loads are known to be aligned; the
    output is dense.
    """
    pid = tl.program_id(0)
    head = pid // parts
    part = pid % parts
    b = (head // H).to(tl.int64)
    h = (head % H).to(tl.int64)
    kv_h = h // group
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    q_head = q_ptr + (b * q_stride_b + h * q_stride_h) * ALIGN
    k_head = k_ptr + (b * k_stride_b + kv_h * k_stride_h) * ALIGN
    v_head = v_ptr + (b * v_stride_b + kv_h * v_stride_h) * ALIGN
    bias_head = bias_ptr + b * bias_stride_b + h * bias_stride_h
    mask_row = mask_ptr + b * mask_stride_b
    out_stride_m = H * DV
    out_head = out_ptr + b * Mq * out_stride_m + h * DV
    lse_head = lse_ptr + head.to(tl.int64) * Mq

    k_step = k_stride_n * ALIGN
    v_step = v_stride_n * ALIGN
    k, live = _held(k_head, k_step, mask_row, mask_stride_n, offs_n, offs_d, Mk, D, MASK)
    v, live = _held(v_head, v_step, mask_row, mask_stride_n, offs_n, offs_dv, Mk, DV, MASK)
    k2, v2, live2 = k, v, live
    if REST != 0:
        more = BLOCK_N + tl.arange(0, REST)
        k2, live2 = _held(k_head, k_step, mask_row, mask_stride_n, more, offs_d, Mk, D, MASK)
        v2, live2 = _held(v_head, v_step, mask_row, mask_stride_n, more, offs_dv, Mk, DV, MASK)

    if LOOP:
        for tile in range(part, tl.cdiv(Mq, BLOCK_M), parts):
            _query_tile(
                tile, q_head, bias_head, out_head, lse_head, k, k2, v, v2, live, live2,
                q_stride_m * ALIGN, out_stride_m, bias_stride_m, bias_stride_n, scale, Mq, Mk,
                D, DV, BLOCK_M, BLOCK_N, REST, BIAS, MASK, WRITE_LSE, PRECISION, LOG2E, LN2,
            )  # fmt: skip
    else:
        _query_tile(
            part, q_head, bias_head, out_head, lse_head, k, k2, v, v2, live, live2,
            q_stride_m * ALIGN, out_stride_m, bias_stride_m, bias_stride_n, scale, Mq, Mk,
            D, DV, BLOCK_M, BLOCK_N, REST, BIAS, MASK, WRITE_LSE, PRECISION, LOG2E, LN2,
        )  # fmt: skip


def constants_for_short(
    config: ShortConfig,
    *,
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    bias: torch.dtype | None,
    key_mask: bool,
    with_lse: bool,
    align: int,
) -> dict[str, object]:
    """The kernel's compile-time arguments; also what the ahead-of-time check compiles."""
    return {
        "D": head_dim,
        "DV": value_dim,
        "BLOCK_D": padded(head_dim),
        "BLOCK_DV": padded(value_dim),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "REST": config.rest,
        "LOOP": config.programs != 0,
        "BIAS": 0 if bias is None else 2 if bias == torch.bool else 1,
        "MASK": key_mask,
        "WRITE_LSE": with_lse,
        "ALIGN": align,
        # three tf32 products keep fp32's accuracy on tensor cores, plain tf32 loses 13 bits
        "PRECISION": "tf32x3" if dtype == torch.float32 else "ieee",
        "LOG2E": LOG2E,
        "LN2": LN2,
    }


def short_source(
    config: ShortConfig,
    *,
    head_dim: int,
    dtype: torch.dtype,
    bias: torch.dtype | None = None,
    key_mask: bool = False,
    with_lse: bool = False,
) -> ASTSource:
    """What the ahead-of-time check compiles: aligned pointers and strides, a bias dense in keys."""
    constants = constants_for_short(
        config,
        head_dim=head_dim,
        value_dim=head_dim,
        dtype=dtype,
        bias=bias,
        key_mask=key_mask,
        with_lse=with_lse,
        align=16 // dtype.itemsize,
    )
    names = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
    pointed = {"bias_ptr": names.get(bias or dtype, "u8"), "mask_ptr": "u8", "lse_ptr": "fp32"}
    fixed: dict[str, object] = dict(constants)
    if bias is not None:
        fixed["bias_stride_n"] = 1
    signature: dict[str, str] = {}
    aligned: dict[tuple[int, ...], list[list[object]]] = {}
    for index, name in enumerate(attention_short_kernel.arg_names):
        if name in fixed:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = f"*{pointed.get(name, names[dtype])}"
            aligned[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name == "scale" else "i32"
    return ASTSource(attention_short_kernel, signature, constexprs=fixed, attrs=aligned)


def _alignment(*tensors: torch.Tensor) -> int:
    """Elements that all strides in use are multiples of: those of 16 bytes, or 1."""
    step = 16 // tensors[0].dtype.itemsize
    return (
        step
        if all(
            stride % step == 0
            for tensor in tensors
            for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
            if size > 1
        )
        else 1
    )


def _within_reach(bias: torch.Tensor) -> torch.Tensor:
    """The bias, or a dense copy where 512 steps in a tile would overrun 32-bit offsets."""
    far = any(bias.shape[dim] > 1 and bias.stride(dim) * 512 >= 2**31 for dim in (2, 3))
    return bias.contiguous() if far else bias


def launch_attention_short(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    scale: float,
    key_mask: torch.Tensor | None = None,
    output_dtype: torch.dtype,
    with_lse: bool,
    ladder: tuple[ShortConfig, ...],
    bind: Callable[[Again], None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Runs the kernel on BMHK tensors of one dtype with a contiguous last dim.

    Args:
        query: `[B, Mq, H, K]`. key: `[B, Mk, Hk, K]`. value: `[B, Mk, Hk, Kv]`; any strides, Mk at
            most what the ladder's configurations hold.
        bias: float or bool, broadcastable to `[B, H, Mq, Mk]`; read through its strides.
        scale: factor of the scores.
        key_mask: bool `[B, Mk]`, True = the key exists; others are never read.
        output_dtype: dtype of the output.
        with_lse: also write the rows' log-sum-exp.
        ladder: launch configurations for these keys, best first.
        bind: gets what does it again; not with lse, nor where a tensor was copied on the way.

    Returns:
        `[B, Mq, H, Kv]` contiguous, and `[B, H, Mq]` fp32 (natural log) or None.

    Raises:
        LaunchRefused: the driver has too few resources for every configuration.
    """
    given = (query, bias)
    query = reach(query, 1)
    batch, queries, heads, head_dim = query.shape
    keys, key_heads, value_dim = key.shape[1], key.shape[2], value.shape[3]
    assert all(keys <= config.block_n + config.rest for config in ladder), "more keys than held"
    device = query.device
    out = torch.empty((batch, queries, heads, value_dim), dtype=output_dtype, device=device)
    lse = (
        torch.empty((batch, heads, queries), dtype=torch.float32, device=device)
        if with_lse
        else None
    )
    bias_dtype = None if bias is None else bias.dtype
    bias_strides: tuple[int, ...] = (0, 0, 0, 0)
    if bias is not None:
        expanded = bias.expand(batch, heads, queries, keys)
        near = _within_reach(expanded)
        bias_strides = near.stride()
        bias = bias if near is expanded else near
    mask_strides: tuple[int, ...] = (0, 0)
    if key_mask is not None:
        key_mask = key_mask.expand(batch, keys)
        mask_strides = key_mask.stride()
    repeats = query is given[0] and bias is given[1] and output_dtype == query.dtype
    align = _alignment(query, key, value)
    facts = target.of(device)
    kernel: Any = attention_short_kernel

    def launch(config: AttentionConfig) -> None:
        assert isinstance(config, ShortConfig)
        parts = parts_for(config, batch, heads, queries, facts.multiprocessors)
        constants = constants_for_short(
            config,
            head_dim=head_dim,
            value_dim=value_dim,
            dtype=query.dtype,
            bias=bias_dtype,
            key_mask=key_mask is not None,
            with_lse=with_lse,
            align=align,
        )
        fixed = (
            *(stride // align for t in (query, key, value) for stride in t.stride()[:3]),
            *bias_strides,
            *mask_strides,
            heads,
            heads // key_heads,
            queries,
            keys,
            parts,
        )
        grid = (batch * heads * parts, 1, 1)
        compiled = kernel[grid](
            query,
            key,
            value,
            query if bias is None else mask_bytes(bias),
            query if key_mask is None else mask_bytes(key_mask),
            out,
            out if lse is None else lse,
            scale if bias is not None else scale * LOG2E,
            *fixed,
            **constants,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            enable_fp_fusion=True,
        )
        if bind is not None and repeats and not with_lse and compiled is not None:
            bound = Bound(compiled, kernel, grid, fixed, constants)
            bind(bound.with_masks(out.shape, bias is not None))

    step_key = (
        "short", facts, query.dtype, bias_dtype, key_mask is None, head_dim, value_dim, ladder,
    )  # fmt: skip
    with torch.cuda.device(device) if query.is_cuda else contextlib.nullcontext():
        run_ladder(step_key, ladder, launch)
    return out, lse
