"""Gradients of unmasked attention, every tile of it through tensor descriptors.

Keys and values have one owner per key tile, queries one per query tile; every sum has one owner and
a fixed order, without atomics, so equal inputs give equal bits. It knows descriptors and tiles, and
must not choose tiles or judge inputs.
"""

import triton
import triton.language as tl

from sdx_kernels._triton.attention_bwd_parts import weights

__all__ = ["keys_tma_kernel", "marks_kernel", "queries_tma_kernel"]


@triton.jit(do_not_specialize=["Mq", "padded", "line"])
def marks_kernel(
    lse_ptr, delta_ptr, tail_ptr, facts_ptr, wide_ptr, Mq, padded, line,
    BLOCK: tl.constexpr, WIDE: tl.constexpr, LOG2E: tl.constexpr,
):  # fmt: skip
    """One head's facts in lines that a tensor map can hold, and whether a row needs its tail.

    facts: `[4, B · H, padded]`: the log-sum-exp in log2 units, delta, the log-sum-exp and the tail.

    A row needs its tail where |lse| ≥ WIDE, or where lse or delta is not finite: such heads are
    computed as the portable kernels do, all others with one multiply-add a score.
    """
    head = tl.program_id(0).to(tl.int64)
    facts_ptr += head * padded
    line += tl.zeros((), tl.int64)
    worst = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, Mq, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        inside = rows < Mq
        lse = tl.load(lse_ptr + head * Mq + rows, mask=inside, other=0.0)
        delta = tl.load(delta_ptr + head * Mq + rows, mask=inside, other=0.0)
        tail = tl.load(tail_ptr + head * Mq + rows, mask=inside, other=0.0)
        tl.store(facts_ptr + rows, lse * LOG2E, mask=inside)
        tl.store(facts_ptr + line + rows, delta, mask=inside)
        tl.store(facts_ptr + 2 * line + rows, lse, mask=inside)
        tl.store(facts_ptr + 3 * line + rows, tail, mask=inside)
        # comparisons that NaN fails
        plain = (tl.abs(lse) < WIDE) & (tail == 0.0)
        worst = tl.maximum(worst, tl.where(plain, 0, 1))
    tl.store(wide_ptr + head, tl.max(worst, 0))


@triton.jit
def _tile(desc, b, h, first, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """[ROWS, WIDTH] of one head; rows and channels beyond the tensor's are zeros."""
    return tl.reshape(desc.load([b, h, first, 0]), (ROWS, WIDTH))


@triton.jit
def _fact(desc, which: tl.constexpr, head, m, ROWS: tl.constexpr):
    """One of the four facts of a head's rows, 0 where the row does not exist."""
    return tl.reshape(desc.load([which, head, m]), (ROWS,))


@triton.jit
def _careful(products, lse, tail, scale, LOG2E: tl.constexpr):
    """Weights as the portable kernels compute them: no bound on scores, NaN kept."""
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    return weights((products * scale - lse) * LOG2E - tail)


@triton.jit
def _over_queries(
    dk, dv, k, v, q_desc, grad_desc, facts_desc, b, h, head, begin, end, scale,
    BLOCK_M: tl.constexpr, CAREFUL: tl.constexpr, STAGES: tl.constexpr, LOG2E: tl.constexpr,
):  # fmt: skip
    """Adds the query tiles of one head from begin to end to a key tile's gradients."""
    for m in tl.range(begin, end, BLOCK_M, num_stages=STAGES):
        q = _tile(q_desc, b, h, m, BLOCK_M, k.shape[1])
        grad = _tile(grad_desc, b, h, m, BLOCK_M, v.shape[1])
        # [BLOCK_N, BLOCK_M]: transposed, so that the weights are the left side of the products
        # below and never leave the registers
        s = tl.dot(k, tl.trans(q))
        dp = tl.dot(v, tl.trans(grad))
        # a row that does not exist has a weight of 1, but a gradient and a delta of 0
        if CAREFUL:
            lse = _fact(facts_desc, 2, head, m, BLOCK_M)
            tail = _fact(facts_desc, 3, head, m, BLOCK_M)
            p = _careful(s, lse[None, :], tail[None, :], scale, LOG2E)
        else:
            log = _fact(facts_desc, 0, head, m, BLOCK_M)
            p = tl.math.exp2(s * (scale * LOG2E) - log[None, :])
        dv = tl.dot(p.to(grad.dtype), grad, dv)
        ds = p * (dp - _fact(facts_desc, 1, head, m, BLOCK_M)[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    return dk, dv


# lengths are never specialised: a new picture size must not compile anything
@triton.jit(do_not_specialize=["H", "group", "Mq", "Mk"])
def keys_tma_kernel(
    q_desc, k_desc, v_desc, grad_desc, dk_desc, dv_desc, facts_desc, wide_ptr, scale, H, group, Mq,
    Mk,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, LOG2E: tl.constexpr,
):  # fmt: skip
    """dk and dv of one key tile of one key head, summed over the group's query heads.

    Descriptors view the tensors as [B, H, M, D] in blocks of one head, and what `marks_kernel`
    wrote as [4, B · H, Mq].
    """
    pid = tl.program_id(0)
    tiles = tl.cdiv(Mk, BLOCK_N)
    first = (pid % tiles) * BLOCK_N
    key_heads = H // group
    b = pid // tiles // key_heads
    key_head = pid // tiles % key_heads
    k = _tile(k_desc, b, key_head, first, BLOCK_N, BLOCK_D)
    v = _tile(v_desc, b, key_head, first, BLOCK_N, BLOCK_DV)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)
    for member in range(0, group):
        h = key_head * group + member
        head = b * H + h
        careful_from = tl.where(tl.load(wide_ptr + head) != 0, 0, Mq)
        dk, dv = _over_queries(
            dk, dv, k, v, q_desc, grad_desc, facts_desc, b, h, head, 0, careful_from, scale,
            BLOCK_M, False, STAGES, LOG2E,
        )  # fmt: skip
        dk, dv = _over_queries(
            dk, dv, k, v, q_desc, grad_desc, facts_desc, b, h, head, careful_from, Mq, scale,
            BLOCK_M, True, 1, LOG2E,
        )  # fmt: skip
    dk = (dk * scale).to(dk_desc.dtype)
    dk_desc.store([b, key_head, first, 0], tl.reshape(dk, (1, 1, BLOCK_N, BLOCK_D)))
    dv = dv.to(dv_desc.dtype)
    dv_desc.store([b, key_head, first, 0], tl.reshape(dv, (1, 1, BLOCK_N, BLOCK_DV)))


@triton.jit
def _over_keys(
    dq, q, grad, k_desc, v_desc, lse, delta, tail, b, key_head, begin, end, Mk, scale,
    BLOCK_N: tl.constexpr, CAREFUL: tl.constexpr, STAGES: tl.constexpr, LOG2E: tl.constexpr,
):  # fmt: skip
    """Adds the key tiles from begin to end to a query tile's gradient."""
    for n in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        k = _tile(k_desc, b, key_head, n, BLOCK_N, q.shape[1])
        v = _tile(v_desc, b, key_head, n, BLOCK_N, grad.shape[1])
        s = tl.dot(q, tl.trans(k))
        dp = tl.dot(grad, tl.trans(v))
        if CAREFUL:
            p = _careful(s, lse[:, None], tail[:, None], scale, LOG2E)
        else:
            p = tl.math.exp2(s * (scale * LOG2E) - (lse * LOG2E)[:, None])
        ds = p * (dp - delta[:, None])
        if CAREFUL:
            # a key that does not exist has a score of 0, which may outweigh all that do
            ds = tl.where(n + tl.arange(0, BLOCK_N)[None, :] < Mk, ds, 0.0)
        dq = tl.dot(ds.to(k.dtype), k, dq)
    return dq


@triton.jit(do_not_specialize=["H", "group", "Mq", "Mk"])
def queries_tma_kernel(
    q_desc, k_desc, v_desc, grad_desc, dq_desc, lse_ptr, delta_ptr, tail_ptr, wide_ptr, scale,
    H, group, Mq, Mk,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, LOG2E: tl.constexpr,
):  # fmt: skip
    """dq of one query tile of one head."""
    pid = tl.program_id(0)
    tiles = tl.cdiv(Mq, BLOCK_M)
    first = (pid % tiles) * BLOCK_M
    head = pid // tiles
    b = head // H
    h = head % H
    q = _tile(q_desc, b, h, first, BLOCK_M, BLOCK_D)
    grad = _tile(grad_desc, b, h, first, BLOCK_M, BLOCK_DV)
    rows = first + tl.arange(0, BLOCK_M)
    inside = rows < Mq
    at = head.to(tl.int64) * Mq + rows
    lse = tl.load(lse_ptr + at, mask=inside, other=float("inf"))
    delta = tl.load(delta_ptr + at, mask=inside, other=0.0)
    tail = tl.load(tail_ptr + at, mask=inside, other=0.0)
    # the last tile, where keys may be missing, goes with those of wide rows
    whole = (Mk // BLOCK_N) * BLOCK_N
    careful_from = tl.where(tl.load(wide_ptr + head) != 0, 0, whole)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    dq = _over_keys(
        dq, q, grad, k_desc, v_desc, lse, delta, tail, b, h // group, 0, careful_from, Mk,
        scale, BLOCK_N, False, STAGES, LOG2E,
    )  # fmt: skip
    dq = _over_keys(
        dq, q, grad, k_desc, v_desc, lse, delta, tail, b, h // group, careful_from, Mk, Mk,
        scale, BLOCK_N, True, 1, LOG2E,
    )  # fmt: skip
    dq = (dq * scale).to(dq_desc.dtype)
    dq_desc.store([b, h, first, 0], tl.reshape(dq, (1, 1, BLOCK_M, BLOCK_D)))
