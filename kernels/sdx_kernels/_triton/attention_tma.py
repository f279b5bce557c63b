"""Forward attention with every operand through tensor descriptors, and an optimistic softmax.

The optimistic form keeps each row's first reference: no maximum and no rescale afterwards, one
check at the end, and a tile that fails it is computed again in the online form (Milakov and
Gimelshein 2018). It knows descriptors and tiles, and must not choose tiles or judge inputs.
"""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.compiler import ASTSource

from sdx_kernels import target
from sdx_kernels._triton.attention_launch import Bound, Unaligned, run_ladder
from sdx_kernels._triton.descriptors import TensorDescriptor
from sdx_kernels.registry import Again
from sdx_kernels.tuning.attention import AttentionConfig, padded
from sdx_kernels.tuning.attention_tma import TmaConfig, warm_keys

__all__ = [
    "attention_tma_kernel",
    "constants_for_tma",
    "describable",
    "launch_attention_tma",
    "tma_source",
]

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)

#: the largest finite fp16: a row sum below it holds no weight that rounds to infinity
FP16_MAX = 65504.0


@triton.jit
def _product(q, k_desc, b, kv_h, n, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr):
    """[BLOCK_M, BLOCK_N] of q · kᵀ, unscaled; keys beyond the end are zeros."""
    k = tl.reshape(k_desc.load([b, kv_h, n, 0]), (BLOCK_N, q.shape[1]))
    return tl.dot(q, tl.trans(k), input_precision=PRECISION)


@triton.jit
def _step(
    d, acc, l_i, r_i, v_desc, b, kv_h, n, scale, Mk,
    BLOCK_N: tl.constexpr, EDGE: tl.constexpr, ONLINE: tl.constexpr, POSITIVE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the keys n … n + BLOCK_N with products d; r_i is each row's reference, log2 units."""
    s = d * scale
    if EDGE:
        s = tl.where(n + tl.arange(0, BLOCK_N)[None, :] < Mk, s, float("-inf"))
    reference = r_i
    if ONLINE:
        # the product of the maximum is the maximum of the products, and one factor a row
        top = tl.max(d, 1) * scale if POSITIVE and not EDGE else tl.max(s, 1)
        r_new = tl.maximum(r_i, top)
        # a row that has attended nothing yet: −inf − −inf would be NaN
        reference = tl.where(r_new == float("-inf"), 0.0, r_new)
        alpha = tl.math.exp2(r_i - reference)
        l_i = l_i * alpha
        acc = acc * alpha[:, None]
        r_i = r_new
    p = tl.math.exp2(s - reference[:, None])
    l_i += tl.sum(p, 1)
    v = tl.reshape(v_desc.load([b, kv_h, n, 0]), (BLOCK_N, acc.shape[1]))
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, l_i, r_i


@triton.jit
def _sweep(
    acc, l_i, r_i, q, k_desc, v_desc, b, kv_h, start, end, scale, Mk,
    BLOCK_N: tl.constexpr, EDGE: tl.constexpr, ONLINE: tl.constexpr, POSITIVE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Blocks of keys from start to end; EDGE: some of the last one's do not exist."""
    for n in range(start, end, BLOCK_N):
        d = _product(q, k_desc, b, kv_h, n, BLOCK_N, PRECISION)
        acc, l_i, r_i = _step(
            d, acc, l_i, r_i, v_desc, b, kv_h, n, scale, Mk,
            BLOCK_N, EDGE, ONLINE, POSITIVE, PRECISION,
        )  # fmt: skip
    return acc, l_i, r_i


# lengths are never specialised: a new picture size must not compile anything
@triton.jit(do_not_specialize=["H", "group", "Mq", "Mk", "warm"])
def attention_tma_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, redo_ptr, scale, H, group, Mq, Mk, warm,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    OPTIMISTIC: tl.constexpr, WARM: tl.constexpr, POSITIVE: tl.constexpr,
    LIMIT: tl.constexpr, REDO: tl.constexpr, COUNT: tl.constexpr, WRITE_LSE: tl.constexpr,
    PRECISION: tl.constexpr, OUT: tl.constexpr, LN2: tl.constexpr,
):  # fmt: skip
    """out[b, m, h] = softmax(scale · q[b, m, h] · k[b, :, h // group]ᵀ) · v.

    Descriptors view the tensors as [B, H, M, D] in blocks of one head; `scale` holds log2(e).
    Scores, sums and accumulator are fp32; the scale never multiplies a 16-bit value.
    """
    pid = tl.program_id(0)
    tiles = tl.cdiv(Mq, BLOCK_M)
    head = pid // tiles
    first_row = (pid % tiles) * BLOCK_M
    b = head // H
    h = head % H
    kv_h = h // group
    q = tl.reshape(q_desc.load([b, h, first_row, 0]), (BLOCK_M, BLOCK_D))
    r_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    inner = (Mk // BLOCK_N) * BLOCK_N

    trusted = 0
    if OPTIMISTIC:
        if WARM:
            trusted = tl.minimum(warm, inner)
            acc, l_i, r_i = _sweep(
                acc, l_i, r_i, q, k_desc, v_desc, b, kv_h, 0, trusted, scale, Mk,
                BLOCK_N, False, True, POSITIVE, PRECISION,
            )  # fmt: skip
        else:
            d = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            if Mk > 0:
                # in a block of its own: Triton's wait after a loop would keep its keys in shared
                # memory throughout, and leave one program a multiprocessor where two fit
                d = _product(q, k_desc, b, kv_h, 0, BLOCK_N, PRECISION)
            exists = tl.arange(0, BLOCK_N)[None, :] < Mk
            r_i = tl.max(tl.where(exists, d * scale, float("-inf")), 1)
    guess = r_i
    acc, l_i, r_i = _sweep(
        acc, l_i, r_i, q, k_desc, v_desc, b, kv_h, trusted, inner, scale, Mk,
        BLOCK_N, False, not OPTIMISTIC, POSITIVE, PRECISION,
    )  # fmt: skip
    total = l_i
    # the last block, where keys may be missing, in the online form
    acc, l_i, r_i = _sweep(
        acc, l_i, r_i, q, k_desc, v_desc, b, kv_h, inner, Mk, scale, Mk,
        BLOCK_N, True, True, False, PRECISION,
    )  # fmt: skip
    if OPTIMISTIC:
        # comparisons that NaN fails: what is not known to be right is done again
        kept = (total < LIMIT) & (guess > float("-inf"))
        finite = tl.max(tl.where(tl.abs(acc) < float("inf"), 0, 1), 1)
        # as a matrix of one row: the compiler for sm_100 fails on a sum over a vector here
        failed = tl.max(tl.where(kept & (finite == 0), 0, 1)[None, :], 1)
        failed = tl.reshape(failed, ())
        # where every block went through the online form there is nothing to doubt
        failed = tl.where(inner > trusted, failed, 0)
        if COUNT:
            tl.store(redo_ptr + pid, failed)
        if REDO and failed != 0:
            r_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            l_i = tl.zeros((BLOCK_M,), tl.float32)
            acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
            acc, l_i, r_i = _sweep(
                acc, l_i, r_i, q, k_desc, v_desc, b, kv_h, 0, inner, scale, Mk,
                BLOCK_N, False, True, POSITIVE, PRECISION,
            )  # fmt: skip
            acc, l_i, r_i = _sweep(
                acc, l_i, r_i, q, k_desc, v_desc, b, kv_h, inner, Mk, scale, Mk,
                BLOCK_N, True, True, False, PRECISION,
            )  # fmt: skip
    # a row with nothing to attend has a sum of 0 and an accumulator of 0, and gives exactly 0
    safe = tl.where(l_i == 0.0, 1.0, l_i)
    out = (acc / safe[:, None]).to(OUT)
    out_desc.store([b, h, first_row, 0], tl.reshape(out, (1, 1, BLOCK_M, BLOCK_DV)))
    if WRITE_LSE:
        offs_m = first_row + tl.arange(0, BLOCK_M)
        lse = (r_i + tl.math.log2(safe)) * LN2
        tl.store(lse_ptr + head.to(tl.int64) * Mq + offs_m, lse, mask=offs_m < Mq)


_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
_ELEMENTS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def constants_for_tma(
    config: TmaConfig,
    *,
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    output_dtype: torch.dtype,
    with_lse: bool,
    positive: bool = True,
    count: bool = False,
) -> dict[str, object]:
    """The kernel's compile-time arguments; also what the ahead-of-time check compiles."""
    return {
        "BLOCK_D": padded(head_dim),
        "BLOCK_DV": padded(value_dim),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "OPTIMISTIC": config.optimistic,
        "WARM": config.warm_share != 0,
        "POSITIVE": positive,
        # a bf16 weight reaches as far as the fp32 sum does
        "LIMIT": FP16_MAX if dtype == torch.float16 else math.inf,
        "REDO": True,
        "COUNT": count,
        "WRITE_LSE": with_lse,
        "PRECISION": "tf32x3" if dtype == torch.float32 else "ieee",
        "OUT": _ELEMENTS[output_dtype],
        "LN2": LN2,
    }


def tma_source(
    config: TmaConfig, *, head_dim: int, dtype: torch.dtype, with_lse: bool = False
) -> ASTSource:
    """What the ahead-of-time check compiles."""
    constants = constants_for_tma(
        config,
        head_dim=head_dim,
        value_dim=head_dim,
        dtype=dtype,
        output_dtype=dtype,
        with_lse=with_lse,
    )
    name, width = _NAMES[dtype], padded(head_dim)
    rows = {"q_desc": config.block_m, "out_desc": config.block_m}
    signature: dict[str, str] = {}
    for argument in attention_tma_kernel.arg_names:
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument.endswith("_desc"):
            block = f"1,1,{rows.get(argument, config.block_n)},{width}"
            signature[argument] = f"tensordesc<{name}[{block}]>"
        elif argument.endswith("_ptr"):
            signature[argument] = {"lse_ptr": "*fp32"}.get(argument, "*i32")
        else:
            signature[argument] = "fp32" if argument == "scale" else "i32"
    return ASTSource(attention_tma_kernel, signature, constexprs=constants)


def describable(tensor: torch.Tensor) -> bool:
    """Whether a tensor map can hold a BMHK tensor: 16-byte steps and start, dense last dim."""
    step = 16 // tensor.dtype.itemsize
    return (
        tensor.stride(3) == 1
        and tensor.data_ptr() % 16 == 0
        and all(
            size == 1 or (stride % step == 0 and 0 < stride < 2**36)
            for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
        )
    )


#: what a descriptor holds besides its tensor, by all that decides it; never by address
_described: dict[tuple[object, ...], dict[str, object]] = {}
_MOST_DESCRIBED = 4096


def _descriptor(tensor: torch.Tensor, rows: int) -> TensorDescriptor:
    """BMHK seen as [B, H, M, D], in blocks of `rows` of one head; what is outside reads as 0.

    Building and checking one takes 7 µs of processor time, and a launch has four; 1 µs where a
    tensor of the same shape, strides and dtype was seen before. The address is checked every time.

    Raises:
        LaunchRefused: a stride or the address is no multiple of 16 bytes.
    """
    key = (tensor.shape, tensor.stride(), tensor.dtype, rows)
    fields = _described.get(key)
    if fields is None or tensor.data_ptr() % 16 != 0:
        if not describable(tensor):
            raise Unaligned
        batch, length, heads, dim = tensor.shape
        # the stride of a dim of size 1 means nothing, and need not be a multiple of 16 bytes
        step = 16 // tensor.dtype.itemsize
        strides = (
            stride if size > 1 else step
            for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
        )
        stride_b, stride_m, stride_h = strides
        whole = TensorDescriptor(
            tensor,
            [batch, heads, length, dim],
            [stride_b, stride_h, stride_m, 1],
            [1, 1, rows, padded(dim)],
        )
        if len(_described) >= _MOST_DESCRIBED:
            _described.clear()
        fields = _described[key] = {**vars(whole), "base": None}
    return _like(fields, tensor)


def _like(fields: dict[str, object], tensor: torch.Tensor) -> TensorDescriptor:
    """The descriptor of these fields for another tensor, which nobody checks again."""
    descriptor: TensorDescriptor = object.__new__(TensorDescriptor)
    vars(descriptor).update(fields, base=tensor)
    return descriptor


def _again(bound: Bound, described: tuple[TensorDescriptor, ...]) -> Again:
    """The launch with other tensors, described as the first ones."""
    q, k, v, o = ({**vars(descriptor), "base": None} for descriptor in described)
    shape = described[3].base.shape

    def again(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        out = torch.empty(shape, dtype=query.dtype, device=query.device)
        bound(
            _like(q, query),
            _like(k, key),
            _like(v, value),
            _like(o, out),
            None,
            None,
            scale * LOG2E,
        )
        return out

    return again


def launch_attention_tma(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    output_dtype: torch.dtype,
    with_lse: bool,
    ladder: tuple[TmaConfig, ...],
    redone: torch.Tensor | None = None,
    bind: Callable[[Again], None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Runs the kernel on BMHK tensors of one dtype, unmasked.

    Args:
        query: `[B, Mq, H, K]`. key: `[B, Mk, Hk, K]`. value: `[B, Mk, Hk, Kv]`; each `describable`.
        scale: factor of the scores.
        output_dtype: dtype of the output.
        with_lse: also write the rows' log-sum-exp.
        ladder: launch configurations, best first.
        redone: int32, at least `B · H · ⌈Mq / block_m⌉` elements: gets 1 for every query tile that
            the optimistic form gave up, else 0. Default: not counted.
        bind: gets what does it again; not with lse or `redone`.

    Returns:
        `[B, Mq, H, Kv]` contiguous, and `[B, H, Mq]` fp32 (natural log) or None.

    Raises:
        LaunchRefused: strides or addresses are not multiples of 16 bytes, or the driver has too
            few resources for every configuration.
    """
    batch, queries, heads, head_dim = query.shape
    keys, key_heads, value_dim = key.shape[1], key.shape[2], value.shape[3]
    device = query.device
    out = torch.empty((batch, queries, heads, value_dim), dtype=output_dtype, device=device)
    lse = (
        torch.empty((batch, heads, queries), dtype=torch.float32, device=device)
        if with_lse
        else None
    )
    facts = target.of(device)
    kernel: Any = attention_tma_kernel

    def launch(config: AttentionConfig) -> None:
        assert isinstance(config, TmaConfig)
        tiles = batch * heads * -(-queries // config.block_m)
        constants = constants_for_tma(
            config,
            head_dim=head_dim,
            value_dim=value_dim,
            dtype=query.dtype,
            output_dtype=output_dtype,
            with_lse=with_lse,
            positive=scale > 0.0,
            count=redone is not None,
        )
        fixed = (heads, heads // key_heads, queries, keys, warm_keys(config, keys))
        grid = (tiles, 1, 1)
        described = (
            _descriptor(query, config.block_m),
            _descriptor(key, config.block_n),
            _descriptor(value, config.block_n),
            _descriptor(out, config.block_m),
        )
        compiled = kernel[grid](
            *described,
            lse,
            redone,
            scale * LOG2E,
            *fixed,
            **constants,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            maxnreg=config.registers or None,
            enable_fp_fusion=True,
        )
        repeats = not with_lse and redone is None and output_dtype == query.dtype
        if bind is not None and repeats and compiled is not None:
            bind(_again(Bound(compiled, kernel, grid, fixed, constants), described))

    step_key = ("tma", facts, query.dtype, output_dtype, head_dim, value_dim, ladder)
    with torch.cuda.device(device) if query.is_cuda else contextlib.nullcontext():
        run_ladder(step_key, ladder, launch)
    return out, lse
