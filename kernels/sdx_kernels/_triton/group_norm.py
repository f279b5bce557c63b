"""Group norm of channels-last tensors in parts: statistics while storing, then one pass to apply.

It knows pointers, strides and tiles, and must not judge inputs. Every sum has one owner and a fixed
order, without atomics, so equal inputs give equal bits.
"""

import torch
import triton
import triton.language as tl

from sdx_kernels._triton.binaries import start
from sdx_kernels.tuning.group_norm import AFFINE_WARPS, GroupNormTile, tile_for

__all__ = [
    "affine",
    "affine_constants",
    "normalized_rows",
    "store_rows",
    "tile_constants",
    "upsampled_rows",
]

#: sizes change with every picture and must not compile anew
SIZES = ("pixels", "first_slot", "slots", "first_pixel", "valid_pixels")


@triton.jit(do_not_specialize=SIZES)
def store_kernel(
    rows_ptr, bias_ptr, residual_ptr, out_ptr, moments_ptr, counts_ptr,
    rows_stride_b, residual_stride_b, out_stride_b, pixels, first_slot, slots, divisor,
    C: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, STEPS: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, DIVIDE: tl.constexpr, STORE: tl.constexpr,
    MOMENTS: tl.constexpr,
):  # fmt: skip
    """out = (rows + bias + residual) / divisor, and each channel's mean and squared deviation.

    A program has STEPS x BLOCK_P pixels of BLOCK_C channels of one picture, and one slot of the
    statistics, `[B, slots, 2, C]` in fp32; deviations are from the mean of the first BLOCK_P.
    """
    chunk, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    offs_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside_c = offs_c < C
    bias = tl.zeros((BLOCK_C,), tl.float32)
    if BIAS:
        bias += tl.load(bias_ptr + offs_c, mask=inside_c, other=0.0).to(tl.float32)
    origin = tl.zeros((BLOCK_C,), tl.float32)
    # a thread's own sums: reducing in every step takes twice the time of all else (H200, fp16)
    sums = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    squares = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for step in range(0, STEPS):
        first = (chunk * STEPS + step) * BLOCK_P
        offs_p = first + tl.arange(0, BLOCK_P)
        inside = (offs_p < pixels)[:, None] & inside_c[None, :]
        offs = offs_p.to(tl.int64)[:, None] * C + offs_c[None, :]
        x = tl.load(rows_ptr + b * rows_stride_b + offs, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            x += bias[None, :]
        if RESIDUAL:
            x += tl.load(
                residual_ptr + b * residual_stride_b + offs, mask=inside, other=0.0
            ).to(tl.float32)  # fmt: skip
        if DIVIDE:
            x = x / divisor
        # the statistics are of what later passes read: the rounded value
        kept = x.to(out_ptr.dtype.element_ty)
        if STORE:
            tl.store(out_ptr + b * out_stride_b + offs, kept, mask=inside)
        if MOMENTS:
            x = tl.where(inside, kept.to(tl.float32), 0.0)
            if step == 0:
                # near the slot's mean, so that the squares do not cancel where it is large
                origin = tl.sum(x, 0) / tl.minimum(pixels - first, BLOCK_P).to(tl.float32)
            far = tl.where(inside, x - origin[None, :], 0.0)
            sums += far
            squares += far * far
    if MOMENTS:
        slot = first_slot + chunk
        count = tl.minimum(pixels - chunk * STEPS * BLOCK_P, STEPS * BLOCK_P).to(tl.float32)
        shift = tl.sum(sums, 0) / count
        squared = tl.maximum(tl.sum(squares, 0) - shift * shift * count, 0.0)
        at = moments_ptr + (b * slots + slot) * (2 * C) + offs_c
        tl.store(at, origin + shift, mask=inside_c)
        tl.store(at + C, squared, mask=inside_c)
        if (b == 0) & (tl.program_id(1) == 0):
            tl.store(counts_ptr + slot, count)


@triton.jit(do_not_specialize=SIZES)
def affine_kernel(
    moments_ptr, counts_ptr, weight_ptr, bias_ptr, affine_ptr, slots, eps,
    C: tl.constexpr, EACH: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
    AFFINE: tl.constexpr,
):  # fmt: skip
    """Factor and offset of each channel of one group, `[B, 2, C]` in fp32, from all slots."""
    group, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    local = tl.arange(0, BLOCK_C)
    offs_c = group * EACH + local
    inside_c = local < EACH
    head = moments_ptr + b * slots * (2 * C)
    # relative to the first slot's mean, so that large means do not cancel
    origin = tl.load(head + group * EACH)
    weighted = tl.zeros((BLOCK_S, BLOCK_C), tl.float32)
    numbers = tl.zeros((BLOCK_S,), tl.float32)
    for first in range(0, slots, BLOCK_S):
        offs_s = first + tl.arange(0, BLOCK_S)
        there = offs_s < slots
        inside = there[:, None] & inside_c[None, :]
        counts = tl.load(counts_ptr + offs_s, mask=there, other=0.0)
        at = head + offs_s.to(tl.int64)[:, None] * (2 * C) + offs_c[None, :]
        means = tl.load(at, mask=inside, other=0.0)
        weighted += tl.where(inside, (means - origin) * counts[:, None], 0.0)
        numbers += counts
    number = tl.sum(numbers, 0) * EACH
    shift = tl.sum(tl.sum(weighted, 1), 0) / number
    squared = tl.zeros((BLOCK_S, BLOCK_C), tl.float32)
    for first in range(0, slots, BLOCK_S):
        offs_s = first + tl.arange(0, BLOCK_S)
        there = offs_s < slots
        inside = there[:, None] & inside_c[None, :]
        counts = tl.load(counts_ptr + offs_s, mask=there, other=0.0)
        at = head + offs_s.to(tl.int64)[:, None] * (2 * C) + offs_c[None, :]
        far = tl.load(at, mask=inside, other=0.0) - origin - shift
        squares = tl.load(at + C, mask=inside, other=0.0)
        squared += tl.where(inside, squares + far * far * counts[:, None], 0.0)
    variance = tl.sum(tl.sum(squared, 1), 0) / number
    factor = tl.zeros((BLOCK_C,), tl.float32) + 1.0 / tl.sqrt_rn(variance + eps)
    offset = tl.zeros((BLOCK_C,), tl.float32)
    if AFFINE:
        factor *= tl.load(weight_ptr + offs_c, mask=inside_c, other=0.0).to(tl.float32)
        offset += tl.load(bias_ptr + offs_c, mask=inside_c, other=0.0).to(tl.float32)
    out = affine_ptr + b * (2 * C) + offs_c
    tl.store(out, factor, mask=inside_c)
    tl.store(out + C, offset - (origin + shift) * factor, mask=inside_c)


@triton.jit(do_not_specialize=SIZES)
def normalize_kernel(
    source_ptr, affine_ptr, out_ptr, source_stride_b, out_stride_b, pixels, first_pixel,
    valid_pixels,
    C: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, STEPS: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    """Pixels `first_pixel`… of a picture, normalised; zeros before its first and after its last."""
    chunk, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    offs_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside_c = offs_c < C
    factor = tl.load(affine_ptr + b * (2 * C) + offs_c, mask=inside_c, other=0.0)
    offset = tl.load(affine_ptr + b * (2 * C) + C + offs_c, mask=inside_c, other=0.0)
    for step in range(0, STEPS):
        offs_p = (chunk * STEPS + step) * BLOCK_P + tl.arange(0, BLOCK_P)
        written = (offs_p < pixels)[:, None] & inside_c[None, :]
        at = offs_p.to(tl.int64) + first_pixel
        read = written & ((at >= 0) & (at < valid_pixels))[:, None]
        source = source_ptr + b * source_stride_b + at[:, None] * C + offs_c[None, :]
        x = tl.load(source, mask=read, other=0.0).to(tl.float32)
        y = x * factor[None, :] + offset[None, :]
        if SILU:
            y = y / (1.0 + tl.exp(-y))
        y = tl.where(read, y, 0.0)
        out = out_ptr + b * out_stride_b + offs_p.to(tl.int64)[:, None] * C + offs_c[None, :]
        tl.store(out, y.to(out_ptr.dtype.element_ty), mask=written)


@triton.jit(do_not_specialize=("pixels", "width", "first_row", "height"))
def upsample_kernel(
    source_ptr, out_ptr, source_stride_b, out_stride_b, pixels, width, first_row, height,
    C: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Rows `first_row`… of a picture of twice the height and width; zeros before and after it.

    `width` is the source's, `height` its number of rows.
    """
    chunk, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    offs_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside_c = offs_c < C
    for step in range(0, STEPS):
        offs_p = (chunk * STEPS + step) * BLOCK_P + tl.arange(0, BLOCK_P)
        written = (offs_p < pixels)[:, None] & inside_c[None, :]
        row, column = offs_p // (2 * width) + first_row, offs_p % (2 * width)
        read = written & ((row >= 0) & (row < 2 * height))[:, None]
        at = (row // 2).to(tl.int64) * width + column // 2
        source = source_ptr + b * source_stride_b + at[:, None] * C + offs_c[None, :]
        x = tl.load(source, mask=read, other=0.0)
        out = out_ptr + b * out_stride_b + offs_p.to(tl.int64)[:, None] * C + offs_c[None, :]
        tl.store(out, x, mask=written)


def tile_constants(channels: int) -> dict[str, object]:
    """Compile-time arguments that no input decides but the number of channels."""
    tile = tile_for(channels)
    return {
        "C": channels,
        "BLOCK_P": tile.pixels,
        "BLOCK_C": tile.channels,
        "STEPS": tile.steps,
    }


def affine_constants(channels: int, groups: int, *, with_affine: bool) -> dict[str, object]:
    """Compile-time arguments of the kernel that ends the gathering."""
    each = channels // groups
    block = triton.next_power_of_2(each)
    return {
        "C": channels,
        "EACH": each,
        "BLOCK_S": max(16, 2048 // block),
        "BLOCK_C": block,
        "AFFINE": with_affine,
    }


def _grid(tile: GroupNormTile, batch: int, channels: int, pixels: int) -> tuple[int, int, int]:
    chunks = triton.cdiv(pixels, tile.pixels * tile.steps)
    return chunks, triton.cdiv(channels, tile.channels), batch


def store_rows(
    rows: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    divisor: float,
    moments: torch.Tensor | None,
    counts: torch.Tensor | None,
    first_slot: int,
) -> None:
    """Rows (B, C, H, W), channels last, to `out`, which may be `rows` or `residual`."""
    batch, channels, height, width = rows.shape
    tile = tile_for(channels)
    arguments = (
        rows,
        rows if bias is None else bias,
        rows if residual is None else residual,
        out,
        rows if moments is None else moments,
        rows if counts is None else counts,
        rows.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        height * width,
        first_slot,
        1 if moments is None else moments.shape[1],
        float(divisor),
    )
    constants = {
        **tile_constants(channels),
        "BIAS": bias is not None,
        "RESIDUAL": residual is not None,
        "DIVIDE": divisor != 1,
        "STORE": out is not rows or bias is not None or residual is not None or divisor != 1,
        "MOMENTS": moments is not None,
    }
    grid = _grid(tile, batch, channels, height * width)
    with torch.cuda.device_of(rows):
        start(store_kernel, grid, arguments, constants, tile.num_warps)


def affine(
    moments: torch.Tensor,
    counts: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Factor and offset of each channel, `[B, 2, C]` in fp32."""
    batch, slots, _, channels = moments.shape
    out = moments.new_empty((batch, 2, channels))
    arguments = (
        moments,
        counts,
        moments if weight is None else weight,
        moments if bias is None else bias,
        out,
        slots,
        float(eps),
    )
    constants = affine_constants(channels, groups, with_affine=weight is not None)
    with torch.cuda.device_of(moments):
        start(affine_kernel, (groups, batch, 1), arguments, constants, AFFINE_WARPS)
    return out


def normalized_rows(
    source: torch.Tensor, factors: torch.Tensor, top: int, out: torch.Tensor, silu: bool
) -> None:
    """Rows `top`… of `source` (B, C, H, W), channels last, normalised into all rows of `out`."""
    batch, channels, height, width = source.shape
    tile = tile_for(channels)
    pixels = out.shape[2] * width
    arguments = (
        source,
        factors,
        out,
        source.stride(0),
        out.stride(0),
        pixels,
        top * width,
        height * width,
    )
    constants = {**tile_constants(channels), "SILU": silu}
    grid = _grid(tile, batch, channels, pixels)
    with torch.cuda.device_of(source):
        start(normalize_kernel, grid, arguments, constants, tile.num_warps)


def upsampled_rows(source: torch.Tensor, top: int, out: torch.Tensor) -> None:
    """Rows `top`… of `source` (B, C, H, W), channels last, at twice its size, to all of `out`."""
    batch, channels, height, width = source.shape
    tile = tile_for(channels)
    pixels = out.shape[2] * out.shape[3]
    arguments = (source, out, source.stride(0), out.stride(0), pixels, width, top, height)
    grid = _grid(tile, batch, channels, pixels)
    with torch.cuda.device_of(source):
        start(upsample_kernel, grid, arguments, tile_constants(channels), tile.num_warps)
