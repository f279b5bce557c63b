"""Launches the wide-head kernels, forward and backward, over tensors of one dtype.

It knows shapes, strides, slices and scratch; it must not choose tiles or judge what a caller meant.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sdx_kernels import target
from sdx_kernels._triton.attention_launch import LN2, LOG2E, reach, run_ladder
from sdx_kernels._triton.attention_wide import (
    attention_wide_fwd_kernel,
    attention_wide_mix_kernel,
    attention_wide_scores_kernel,
    attention_wide_tops_kernel,
)
from sdx_kernels._triton.attention_wide_bwd import (
    attention_wide_rows_kernel,
    attention_wide_sum_kernel,
    attention_wide_weights_kernel,
)
from sdx_kernels.bias import Band, Packed
from sdx_kernels.checks import Dropout
from sdx_kernels.errors import InvalidInputs
from sdx_kernels.tuning.attention_wide import (
    TOPS,
    Tile,
    WideConfig,
    WideGradConfig,
    WideKind,
    WideOnePassConfig,
    padded,
    scratch_slices,
)

__all__ = ["Program", "launch_attention_wide_bwd", "launch_attention_wide_fwd", "programs_for"]

#: beyond it fp32 keeps fewer than 13 bits behind the point of a row's log-sum-exp, and backward
#: sums the row's weights anew
HUGE_LSE = 1024.0

#: weights of a flat row of 16384 keys lie at fp16's smallest normal value, 6.1e-5: the scratch of
#: a backward holds them times this power of two
FP16_WEIGHTS = 1024.0


@dataclass(frozen=True)
class Program:
    """A kernel with its compile-time arguments: what is launched, and what is checked ahead.

    Attributes:
        kernel: the Triton function.
        constants: its compile-time arguments.
        num_warps, num_stages: warps and pipeline stages.
        pointers: dtypes pointed to where they are not the inputs' dtype, by argument.
    """

    kernel: Any
    constants: dict[str, object]
    num_warps: int
    num_stages: int
    pointers: dict[str, torch.dtype]

    def start(self, programs: int, *arguments: object) -> None:
        """Launches it; the grid is all on x, since y and z end at 65,535."""
        self.kernel[(programs, 1, 1)](
            *arguments,
            **self.constants,
            num_warps=self.num_warps,
            num_stages=self.num_stages,
            enable_fp_fusion=True,
        )


def _program(
    kernel: Any, tile: Tile | WideOnePassConfig, kind: WideKind, constants: dict[str, object]
) -> Program:
    floats = ("delta_ptr", "factor_ptr", "lse_ptr", "norm_ptr", "sum_ptr", "top_ptr", "total_ptr")
    pointers = dict.fromkeys(floats, torch.float32)
    pointers["mask_ptr"] = torch.bool
    pointers["bias_ptr"] = kind.bias or kind.dtype
    if kind.bias_grad:
        pointers["ds_ptr"] = torch.float32
    return Program(kernel, constants, tile.num_warps, tile.num_stages, pointers)


def _one_pass(config: WideOnePassConfig, kind: WideKind) -> Program:
    constants: dict[str, object] = {
        "D": kind.head_dim,
        "DV": kind.value_dim,
        "CHUNK": padded(kind.head_dim) if config.whole else config.chunk,
        "WHOLE": config.whole,
        "BLOCK_DV": config.block_dv,
        "SPLITS": -(-kind.value_dim // config.block_dv),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "WRITE_LSE": kind.with_lse,
        "LOG2E": LOG2E,
        "LN2": LN2,
    }
    constants |= kind.flags | kind.precision(config.precision)
    return _program(attention_wide_fwd_kernel, config, kind, constants)


def _score_constants(tile: Tile, kind: WideKind, precision: str) -> dict[str, object]:
    constants: dict[str, object] = {
        "D": kind.head_dim,
        "CHUNK": tile.chunk,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "LOG2E": LOG2E,
    }
    return constants | kind.flags | kind.precision(precision)


def _two_passes(config: WideConfig, kind: WideKind) -> tuple[Program, Program, Program]:
    scores = _score_constants(config.scores, kind, config.precision)
    tops: dict[str, object] = {
        "BLOCK_M": TOPS.block_m,
        "BLOCK_T": TOPS.block_n,
        "BIAS": kind.flags["BIAS"],
        "WRITE_LSE": kind.with_lse,
        "LOG2E": LOG2E,
        "LN2": LN2,
    }
    mix = {
        "DV": kind.value_dim,
        "BLOCK_M": config.mix.block_m,
        "BLOCK_DV": config.mix.block_n,
        "BLOCK_C": config.mix.chunk,
        "TILE": config.scores.block_n,
        **kind.flags,
        **kind.precision(config.precision),
    }
    del mix["BIAS"]
    return (
        _program(attention_wide_scores_kernel, config.scores, kind, scores),
        _program(attention_wide_tops_kernel, TOPS, kind, tops),
        _program(attention_wide_mix_kernel, config.mix, kind, mix),
    )


def _rows(config: WideGradConfig, kind: WideKind) -> Program:
    constants = _score_constants(config.rows, kind, config.precision)
    # in fp32 the log-sum-exp's own rounding shows in every weight: dk missed the tolerance by 0.3 %
    huge = 0.0 if kind.dtype == torch.float32 else HUGE_LSE
    constants |= {"DV": kind.value_dim, "HUGE": huge}
    return _program(attention_wide_rows_kernel, config.rows, kind, constants)


def _weights(config: WideGradConfig, kind: WideKind) -> Program:
    constants = _score_constants(config.weights, kind, config.precision)
    constants["DV"] = kind.value_dim
    return _program(attention_wide_weights_kernel, config.weights, kind, constants)


def _sums(config: WideGradConfig, kind: WideKind, *, add: bool) -> tuple[Program, ...]:
    """The products of a backward with its scratch: for dq, dk and dv."""
    tile, banded = config.sums, kind.left or kind.right
    found = []
    for what, width in (("q", kind.head_dim), ("k", kind.head_dim), ("v", kind.value_dim)):
        constants: dict[str, object] = {
            "W": width,
            "BLOCK_N": tile.block_m,
            "BLOCK_C": tile.chunk,
            "BLOCK_W": tile.block_n,
            "TRANSPOSED": what != "q",
            "KEY_MASK": what == "q" and kind.key_mask,
            "TAME": banded or (what != "q" and kind.key_mask),
            "ADD": add and what != "q",
            **kind.precision(config.precision),
        }
        program = _program(attention_wide_sum_kernel, tile, kind, constants)
        if constants["ADD"]:
            program.pointers["out_ptr"] = torch.float32
        if kind.bias_grad and what != "v":
            program.pointers["a_ptr"] = torch.float32
        found.append(program)
    return tuple(found)


def programs_for(
    config: WideConfig | WideOnePassConfig | WideGradConfig, kind: WideKind
) -> tuple[Program, ...]:
    """Every program that a configuration may launch for one kind; what is checked ahead of time."""
    if isinstance(config, WideOnePassConfig):
        return (_one_pass(config, kind),)
    if isinstance(config, WideConfig):
        return _two_passes(config, kind)
    sums = (*_sums(config, kind, add=False), *_sums(config, kind, add=True)[1:])
    return (_rows(config, kind), _weights(config, kind), *sums)


@dataclass(frozen=True)
class _Masks:
    """What masks the scores, in the form that the kernels take."""

    bias: torch.Tensor | None
    key_mask: torch.Tensor | None
    low: int
    high: int

    def pointers(self, stand_in: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        bias = stand_in if self.bias is None else self.bias
        return bias, stand_in if self.key_mask is None else self.key_mask

    @property
    def bias_strides(self) -> tuple[int, ...]:
        return (0, 0, 0, 0) if self.bias is None else self.bias.stride()

    @property
    def mask_stride(self) -> int:
        return 0 if self.key_mask is None else self.key_mask.stride(0)


def _masks(
    bias: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    band: Band | None,
    shape: tuple[int, int, int, int],
) -> _Masks:
    queries, keys = shape[2:]
    low = high = 0
    if band is not None:
        shift = band.shift(queries, keys)
        # beyond these bounds a band says no more, and the sums stay within 32 bits
        low = min(max(shift - (band.left or 0), -queries), keys)
        high = min(max(shift + (band.right or 0), -queries), keys)
    if bias is not None:
        bias = reach(_four_dims(bias), 2, 3).expand(shape)
        bias = bias.view(torch.uint8) if bias.dtype == torch.bool else bias
    if key_mask is not None:
        key_mask = key_mask.contiguous().view(torch.uint8)
    return _Masks(bias, key_mask, low, high)


def _four_dims(bias: torch.Tensor) -> torch.Tensor:
    return bias[(None,) * (4 - bias.dim())]


def _strides(*tensors: torch.Tensor) -> tuple[int, ...]:
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:3])


def _refuse(packed: Packed | None, dropout: Dropout | None) -> None:
    if packed is not None:
        raise InvalidInputs("wide heads take no packed sequences: pass them one by one")
    if dropout is not None:
        raise InvalidInputs("wide heads take no dropout: use the reference")


def _kind(
    query: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    band: Band | None,
    **more: bool,
) -> WideKind:
    return WideKind(
        query.shape[3],
        value.shape[3],
        query.dtype,
        None if bias is None else bias.dtype,
        band is not None and band.left is not None,
        band is not None and band.right is not None,
        key_mask is not None,
        **more,
    )


def _run(
    name: str, device: torch.device, kind: WideKind, ladder: Any, launch: Callable[[Any], None]
) -> None:
    guard = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with guard:
        run_ladder((name, target.of(device), kind, ladder), ladder, launch)


def launch_attention_wide_fwd(
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
    ladder: tuple[WideConfig | WideOnePassConfig, ...],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of wide heads over BMHK tensors of one dtype with a contiguous last dim.

    Args:
        query: `[B, Mq, H, K]`. key: `[B, Mk, Hk, K]`. value: `[B, Mk, Hk, Kv]`; any strides.
        bias: float or bool, broadcastable to `[B, H, Mq, Mk]`; read through its strides.
        scale: factor of the scores.
        key_mask: bool `[B, Mk]`, True = the key exists.
        band: keys that a query may attend, or None.
        packed, dropout: refused.
        output_dtype: dtype of the output.
        with_lse: also write the rows' log-sum-exp.
        ladder: launch configurations, best first.

    Returns:
        `[B, Mq, H, Kv]` contiguous, and `[B, H, Mq]` fp32 or None.

    Raises:
        InvalidInputs: packed sequences or dropout.
        LaunchRefused: the driver has too few resources for every configuration.
    """
    _refuse(packed, dropout)
    query, key, value = reach(query, 1), reach(key, 1), reach(value, 1)
    batch, queries, heads, _ = query.shape
    keys, group, device = key.shape[1], heads // max(1, key.shape[2]), query.device
    masks = _masks(bias, key_mask, band, (batch, heads, queries, keys))
    kind = _kind(query, value, bias, key_mask, band, with_lse=with_lse)
    out = torch.empty((batch, queries, heads, value.shape[3]), dtype=output_dtype, device=device)
    facts: dict[str, Any] = {"dtype": torch.float32, "device": device}
    lse = torch.empty((batch, heads, queries), **facts) if with_lse else None
    lse_or_out = out if lse is None else lse
    factor = scale if bias is not None else scale * LOG2E
    lengths = (heads, group, queries, keys, masks.low, masks.high)

    def in_one_pass(config: WideOnePassConfig) -> None:
        tiles = -(-queries // config.block_m) * -(-value.shape[3] // config.block_dv)
        tensors = (query, key, value, *masks.pointers(query), out, lse_or_out)
        strides = (*_strides(query, key, value), *masks.bias_strides, *_strides(out))
        _one_pass(config, kind).start(
            batch * heads * tiles, *tensors, factor, *strides, masks.mask_stride, *lengths
        )

    def launch(config: WideConfig | WideOnePassConfig) -> None:
        if isinstance(config, WideOnePassConfig):
            in_one_pass(config)
            return
        scores, tops, mix = _two_passes(config, kind)
        row_tile, key_tile = config.scores.block_m, config.scores.block_n
        key_tiles, strips = -(-keys // key_tile), -(-value.shape[3] // config.mix.block_n)
        for items, rows in scratch_slices(batch, heads, queries, keys, query.dtype, copies=1):
            size, count = rows.stop - rows.start, (items.stop - items.start) * heads
            p = _scratch(query, count, size, keys)
            top, sums = (torch.empty((count, key_tiles, size), **facts) for _ in range(2))
            total = torch.empty((count, size), **facts)
            place = (items.start, rows.start, size)
            strides = (*_strides(query, key), *masks.bias_strides, *p.stride()[:2])
            scores.start(
                count * -(-size // row_tile) * key_tiles,
                *(query, key, *masks.pointers(query), p, top, sums, factor),
                *(*strides, masks.mask_stride, *place, *lengths),
            )
            tops.start(
                count * -(-size // TOPS.block_m),
                *(top, sums, total, lse_or_out, *place, heads, queries, key_tiles),
            )
            mix.start(
                count * -(-size // config.mix.block_m) * strips,
                *(p, top, total, value, masks.pointers(query)[1], out),
                *(*p.stride()[:2], *_strides(value, out), masks.mask_stride, *place),
                *(heads, group, keys, masks.low, masks.high),
            )

    _run("wide forward", device, kind, ladder, launch)
    return out, lse


def _scratch(
    query: torch.Tensor, heads: int, rows: int, keys: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """`[heads, rows, keys]` with rows that start at multiples of 16 elements, for wide loads."""
    shape = (heads, rows, -(-keys // 16) * 16)
    return torch.empty(shape, dtype=dtype or query.dtype, device=query.device)


def launch_attention_wide_bwd(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    scale: float,
    key_mask: torch.Tensor | None = None,
    band: Band | None = None,
    packed: Packed | None = None,
    dropout: Dropout | None = None,
    bias_grad: bool = False,
    lse_grad: torch.Tensor | None = None,
    ladder: tuple[WideGradConfig, ...],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of wide heads, the same bits every time; arguments as in the forward.

    Args:
        grad: gradient of the output, `[B, Mq, H, Kv]`.
        out, lse: what the forward gave: `[B, Mq, H, Kv]`, and `[B, H, Mq]` fp32.
        bias_grad: whether the (float) bias's gradient is wanted.
        lse_grad: `[B, H, Mq]`, gradient of the log-sum-exp; None = zero.

    Returns:
        dq, dk, dv in their tensors' dtypes and shapes, and the bias's gradient in its own shape or
        None. All sums are fp32 and of fixed order.

    Raises:
        InvalidInputs: packed sequences or dropout.
        LaunchRefused: the driver has too few resources for every configuration.
    """
    _refuse(packed, dropout)
    grad = grad.to(query.dtype)
    grad = reach(grad if grad.stride(-1) == 1 else grad.contiguous(), 1)
    out = reach(out if out.stride(-1) == 1 else out.contiguous(), 1)
    query, key, value = reach(query, 1), reach(key, 1), reach(value, 1)
    batch, queries, heads, _ = query.shape
    keys, group, dtype = key.shape[1], heads // max(1, key.shape[2]), query.dtype
    masks, lse = _masks(bias, key_mask, band, (batch, heads, queries, keys)), lse.contiguous()
    bias_grad = bias_grad and bias is not None and bias.dtype != torch.bool
    kind = _kind(query, value, bias, key_mask, band, bias_grad=bias_grad)
    lengths = (heads, group, queries, keys, masks.low, masks.high)
    slices = scratch_slices(batch, heads, queries, keys, dtype, copies=2)
    # rows of one item in several slices: their sums meet in fp32, in the slices' order
    meet = not slices or slices[0][1] != slice(0, queries)
    lift = FP16_WEIGHTS if dtype == torch.float16 else 1.0
    grads: list[torch.Tensor] = []

    def launch(config: WideGradConfig) -> None:
        delta, norm = torch.empty_like(lse), torch.empty_like(lse)
        _rows(config, kind).start(
            batch * heads * -(-queries // config.rows.block_m),
            *(query, key, grad, out, *masks.pointers(query), lse, delta, norm, scale),
            *(*_strides(query, key, grad, out), *masks.bias_strides, masks.mask_stride, *lengths),
        )
        if lse_grad is not None:
            # dS = P · (dP − delta + dlse)
            delta -= lse_grad
        fresh: Callable[..., torch.Tensor] = torch.zeros_like if meet else torch.empty_like
        memory: dict[str, Any] = {"memory_format": torch.contiguous_format}
        dq = torch.empty_like(query, **memory)
        dk, dv = (fresh(t, dtype=torch.float32 if meet else dtype, **memory) for t in (key, value))
        grads[:] = [dq, dk, dv]
        if bias is not None and bias_grad:
            grads.append(torch.zeros_like(_four_dims(bias), dtype=torch.float32, **memory))
        for_dq, for_dk, for_dv = _sums(config, kind, add=meet)
        block_m, block_n = config.weights.block_m, config.weights.block_n
        for items, rows in slices:
            size, count = rows.stop - rows.start, (items.stop - items.start) * heads
            p = _scratch(query, count, size, keys)
            ds = _scratch(query, count, size, keys, torch.float32 if bias_grad else None)
            _weights(config, kind).start(
                count * -(-size // block_m) * -(-keys // block_n),
                *(query, key, value, grad, *masks.pointers(query)),
                *(lse, delta, norm, p, ds, scale, lift),
                *(*_strides(query, key, value, grad), *masks.bias_strides, *p.stride()[:2]),
                *(masks.mask_stride, items.start, rows.start, size, *lengths),
            )
            tile = config.sums
            mask, at = masks.pointers(query)[1], rows.start
            for program, a, b, d, factor, first, to, share, n, c in (
                (for_dq, ds, key, dq, scale, 0, at, (1, group), size, keys),
                (for_dk, ds, query, dk, scale, at, 0, (group, 1), keys, size),
                (for_dv, p, grad, dv, 1.0 / lift, at, 0, (group, 1), keys, size),
            ):
                tiles = -(-n // tile.block_m) * -(-d.shape[3] // tile.block_n)
                program.start(
                    (items.stop - items.start) * d.shape[2] * tiles,
                    *(a, b, mask, d, factor, *a.stride()[:2], *_strides(b, d), masks.mask_stride),
                    *(items.start, first, to, d.shape[2], *share, n, c),
                )
            if bias_grad:
                _add_bias_grad(grads[3], ds.unflatten(0, (-1, heads))[..., :keys], items, rows)

    _run("wide backward", query.device, kind, ladder, launch)
    dq, dk, dv, *db = grads
    dbias = db[0].to(bias.dtype).view(bias.shape) if bias is not None and db else None
    return dq, dk.to(dtype), dv.to(dtype), dbias


def _add_bias_grad(total: torch.Tensor, part: torch.Tensor, items: slice, rows: slice) -> None:
    """Adds ds `[items, H, rows, Mk]` to the bias's gradient, summed where the bias broadcasts."""
    spread = [dim for dim in range(4) if total.shape[dim] == 1 and part.shape[dim] > 1]
    if spread:
        part = part.sum(spread, keepdim=True)
    place = total[items] if total.shape[0] > 1 else total
    place = place[:, :, rows] if total.shape[2] > 1 else place
    place += part
