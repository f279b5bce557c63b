"""Forward attention: one online-softmax pass over the keys for a tile of queries.

It knows pointers, strides and tiles, and must not choose tiles or judge inputs. Memory is taken as
hostile: int64 before any stride is multiplied, a mask on every edge.
"""

import contextlib
import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from sdx_kernels import target
from sdx_kernels.errors import LaunchRefused
from sdx_kernels.tuning.attention import MAX_AUTOMATIC_FP32_DIM, AttentionConfig, padded

__all__ = ["attention_fwd_kernel", "constants_for", "grid_for", "launch_attention_fwd"]

_log = logging.getLogger("sdx_kernels")

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)

#: first step of a ladder that launched, by what decides it; saves refused attempts
_steps: dict[tuple[object, ...], int] = {}


@triton.jit
def _keys_loop(
    acc, l_i, m_i, q, k_head, v_head, bias_head, k_offs, v_offs, bias_offs,
    k_stride_n, v_stride_n, bias_stride_n,
    offs_m, offs_n, offs_d, offs_dv, start, end, scale, Mq, Mk, causal_offset,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr,
    BIAS: tl.constexpr, CAUSAL: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr,
    LOG2E: tl.constexpr,
):  # fmt: skip
    """Runs key tiles start…end; EDGE tiles test every key against length and diagonal."""
    FULL_D: tl.constexpr = q.shape[1] == D
    FULL_DV: tl.constexpr = acc.shape[1] == DV
    for n in range(start, end, BLOCK_N):
        here = n + offs_n
        # one 64-bit scalar a tile and 32-bit offsets in it: 64-bit offset tensors cost registers
        first = tl.full((), 0, tl.int64) + n
        k_ptrs = k_head + first * k_stride_n + k_offs
        v_ptrs = v_head + first * v_stride_n + v_offs
        # [BLOCK_N, BLOCK_D]
        if EDGE:
            k = tl.load(k_ptrs, mask=(here[:, None] < Mk) & (offs_d[None, :] < D), other=0.0)
        elif FULL_D:
            k = tl.load(k_ptrs)
        else:
            k = tl.load(k_ptrs, mask=offs_d[None, :] < D, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if BIAS != 0:
            inside = (offs_m[:, None] < Mq) & (here[None, :] < Mk)
            b = tl.load(bias_head + first * bias_stride_n + bias_offs, mask=inside, other=0)
            if BIAS == 2:
                # added, not selected: NaN of a masked key stays NaN, as in the reference
                s += tl.where(b != 0, 0.0, float("-inf"))
            else:
                s += b.to(tl.float32)
        if EDGE:
            allowed = here[None, :] < Mk
            if CAUSAL:
                allowed = allowed & (here[None, :] <= offs_m[:, None] + causal_offset)
            s = tl.where(allowed, s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1))
        reference = m_new
        if BIAS != 0 or CAUSAL:
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
        if EDGE:
            v = tl.load(v_ptrs, mask=(here[:, None] < Mk) & (offs_dv[None, :] < DV), other=0.0)
        elif FULL_DV:
            v = tl.load(v_ptrs)
        else:
            v = tl.load(v_ptrs, mask=offs_dv[None, :] < DV, other=0.0)
        if EDGE and CAUSAL:
            # 0 · NaN is NaN: a key beyond the diagonal must not reach rows that exclude it
            tame = tl.abs(v.to(tl.float32)) < float("inf")
            wild = tl.max(tl.where(tame, 0, 1), 1)
            v = tl.where(tame, v, tl.zeros_like(v))
            hit = tl.max(tl.where(allowed & (wild[None, :] != 0), 1, 0), 1)
            l_i = tl.where(hit != 0, float("nan"), l_i)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        m_i = m_new
    return acc, l_i, m_i


# lengths and offsets are never specialised: a new picture size must not compile anything
@triton.jit(
    do_not_specialize=[
        "H", "group", "Mq", "Mk", "causal_offset", "bias_stride_b", "bias_stride_h",
    ]
)  # fmt: skip
def attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, out_ptr, lse_ptr, scale,
    q_stride_b, q_stride_m, q_stride_h,
    k_stride_b, k_stride_n, k_stride_h,
    v_stride_b, v_stride_n, v_stride_h,
    bias_stride_b, bias_stride_h, bias_stride_m, bias_stride_n,
    out_stride_b, out_stride_m, out_stride_h,
    H, group, Mq, Mk, causal_offset,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BIAS: tl.constexpr, CAUSAL: tl.constexpr, WRITE_LSE: tl.constexpr,
    PRECISION: tl.constexpr, LOG2E: tl.constexpr, LN2: tl.constexpr,
):  # fmt: skip
    """out[b, m, h] = softmax(scale · q[b, m, h] · k[b, :, h // group]ᵀ + bias) · v.

    BIAS: 0 none, 1 float, 2 bool as uint8. Without a bias `scale` holds the factor log2(e) already.
    Scores, sums and accumulator are fp32; the scale never multiplies a 16-bit value.
    """
    pid = tl.program_id(0)
    tiles = tl.cdiv(Mq, BLOCK_M)
    head = pid // tiles
    local_m = tl.arange(0, BLOCK_M)
    offs_m = (pid % tiles) * BLOCK_M + local_m
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    b = (head // H).to(tl.int64)
    h = (head % H).to(tl.int64)
    kv_h = h // group
    tile_row = (pid % tiles).to(tl.int64) * BLOCK_M

    q_head = q_ptr + b * q_stride_b + h * q_stride_h + tile_row * q_stride_m
    q_ptrs = q_head + local_m[:, None] * q_stride_m + offs_d[None, :]
    q = tl.load(q_ptrs, mask=(offs_m[:, None] < Mq) & (offs_d[None, :] < D), other=0.0)
    k_head = k_ptr + b * k_stride_b + kv_h * k_stride_h
    k_offs = offs_n[:, None] * k_stride_n + offs_d[None, :]
    v_head = v_ptr + b * v_stride_b + kv_h * v_stride_h
    v_offs = offs_n[:, None] * v_stride_n + offs_dv[None, :]
    bias_head = bias_ptr + b * bias_stride_b + h * bias_stride_h + tile_row * bias_stride_m
    bias_offs = local_m[:, None] * bias_stride_m + offs_n[None, :] * bias_stride_n

    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    # tiles below `inner` need no test; tiles from `end` on are read by no row of this tile
    end = Mk
    inner = (Mk // BLOCK_N) * BLOCK_N
    if CAUSAL:
        first = (pid % tiles) * BLOCK_M + causal_offset
        end = tl.maximum(0, tl.minimum(Mk, first + BLOCK_M))
        inner = tl.minimum(inner, (tl.maximum(0, first + 1) // BLOCK_N) * BLOCK_N)
    acc, l_i, m_i = _keys_loop(
        acc, l_i, m_i, q, k_head, v_head, bias_head, k_offs, v_offs, bias_offs,
        k_stride_n, v_stride_n, bias_stride_n,
        offs_m, offs_n, offs_d, offs_dv, 0, inner, scale, Mq, Mk, causal_offset,
        D, DV, BLOCK_N, BIAS, CAUSAL, False, PRECISION, LOG2E,
    )  # fmt: skip
    acc, l_i, m_i = _keys_loop(
        acc, l_i, m_i, q, k_head, v_head, bias_head, k_offs, v_offs, bias_offs,
        k_stride_n, v_stride_n, bias_stride_n,
        offs_m, offs_n, offs_d, offs_dv, inner, end, scale, Mq, Mk, causal_offset,
        D, DV, BLOCK_N, BIAS, CAUSAL, True, PRECISION, LOG2E,
    )  # fmt: skip

    # a row with nothing to attend has l = 0 and acc = 0, and gives exactly 0
    out = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    out_head = out_ptr + b * out_stride_b + h * out_stride_h + tile_row * out_stride_m
    out_ptrs = out_head + local_m[:, None] * out_stride_m + offs_dv[None, :]
    inside = (offs_m[:, None] < Mq) & (offs_dv[None, :] < DV)
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=inside)
    if WRITE_LSE:
        # m is -inf where l is 0, and log2(1) leaves it so
        log2_l = tl.math.log2(tl.where(l_i == 0.0, 1.0, l_i))
        lse = m_i + log2_l * LN2 if BIAS != 0 else (m_i + log2_l) * LN2
        lse_ptrs = lse_ptr + head.to(tl.int64) * Mq + offs_m
        tl.store(lse_ptrs, lse, mask=offs_m < Mq)


def grid_for(batch: int, heads: int, queries: int, block_m: int) -> tuple[int, int, int]:
    """Launch grid: everything on x (limit 2³¹ − 1), since y and z end at 65,535."""
    return batch * heads * -(-queries // block_m), 1, 1


def constants_for(
    config: AttentionConfig,
    *,
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    bias: torch.dtype | None,
    causal: bool,
    with_lse: bool,
) -> dict[str, object]:
    """The kernel's compile-time arguments; also what the ahead-of-time check compiles."""
    return {
        "D": head_dim,
        "DV": value_dim,
        "BLOCK_D": padded(head_dim),
        "BLOCK_DV": padded(value_dim),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BIAS": 0 if bias is None else 2 if bias == torch.bool else 1,
        "CAUSAL": causal,
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


def _reach(tensor: torch.Tensor, *dims: int) -> torch.Tensor:
    """The tensor, or a dense copy where a tile of 128 steps would overrun 32-bit offsets."""
    far = any(tensor.shape[dim] > 1 and tensor.stride(dim) * 128 >= 2**31 for dim in dims)
    return tensor.contiguous() if far else tensor


@functools.lru_cache(maxsize=1)
def _say_first_use() -> None:
    """Once a process: the seconds that follow are the compiler's, not the picture's."""
    _log.info(
        "compiling attention kernels (first use on this card; `sdx-accel doctor --warm` does it "
        "ahead) …"
    )


def _run_ladder(
    key: tuple[object, ...],
    ladder: tuple[AttentionConfig, ...],
    launch: Callable[[AttentionConfig], None],
) -> None:
    """Launches the first step that the driver accepts and remembers it."""
    if key not in _steps and not target.interpreting():
        _say_first_use()
    refusal: Exception | None = None
    for step in range(_steps.get(key, 0), len(ladder)):
        try:
            launch(ladder[step])
        except triton.runtime.errors.OutOfResources as error:
            refusal = error
        else:
            _steps[key] = step
            return
    _steps[key] = len(ladder)
    raise LaunchRefused(f"no launch configuration of the attention kernel fits: {refusal}")


def launch_attention_fwd(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    scale: float,
    causal_offset: int | None,
    output_dtype: torch.dtype,
    with_lse: bool,
    ladder: tuple[AttentionConfig, ...],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Runs the kernel on BMHK tensors of one dtype with a contiguous last dim.

    Args:
        query: `[B, Mq, H, K]`. key: `[B, Mk, Hk, K]`. value: `[B, Mk, Hk, Kv]`; any strides.
        bias: float or bool, broadcastable to `[B, H, Mq, Mk]`; read through its strides.
        scale: factor of the scores.
        causal_offset: query i attends keys up to i + offset; None = all.
        output_dtype: dtype of the output.
        with_lse: also write the rows' log-sum-exp.
        ladder: launch configurations, best first.

    Returns:
        `[B, Mq, H, Kv]` contiguous, and `[B, H, Mq]` fp32 or None.

    Raises:
        LaunchRefused: the driver has too few resources for every configuration.
    """
    query, key, value = _reach(query, 1), _reach(key, 1), _reach(value, 1)
    batch, queries, heads, head_dim = query.shape
    keys, key_heads, value_dim = key.shape[1], key.shape[2], value.shape[3]
    out = torch.empty((batch, queries, heads, value_dim), dtype=output_dtype, device=query.device)
    lse = (
        torch.empty((batch, heads, queries), dtype=torch.float32, device=query.device)
        if with_lse
        else None
    )
    bias_dtype = None if bias is None else bias.dtype
    bias_strides: tuple[int, ...] = (0, 0, 0, 0)
    if bias is not None:
        bias = _reach(bias, 2, 3).expand(batch, heads, queries, keys)
        bias_strides = bias.stride()
        bias = bias.view(torch.uint8) if bias.dtype == torch.bool else bias
    causal = causal_offset is not None
    kernel: Any = attention_fwd_kernel

    def launch(config: AttentionConfig) -> None:
        constants = constants_for(
            config,
            head_dim=head_dim,
            value_dim=value_dim,
            dtype=query.dtype,
            bias=bias_dtype,
            causal=causal,
            with_lse=with_lse,
        )
        kernel[grid_for(batch, heads, queries, config.block_m)](
            query,
            key,
            value,
            query if bias is None else bias,
            out,
            out if lse is None else lse,
            scale if bias is not None else scale * LOG2E,
            *query.stride()[:3],
            *key.stride()[:3],
            *value.stride()[:3],
            *bias_strides,
            *out.stride()[:3],
            heads,
            heads // key_heads,
            queries,
            keys,
            causal_offset or 0,
            **constants,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            enable_fp_fusion=True,
        )

    facts = target.of(query.device)
    step_key = (facts, query.dtype, bias_dtype, head_dim, value_dim, causal, ladder)
    on_device = torch.cuda.device(query.device) if query.is_cuda else contextlib.nullcontext()
    with on_device:
        _run_ladder(step_key, ladder, launch)
    return out, lse
