"""Group norm in parts, in plain torch: what the kernels are held to, and what runs without them.

It must not judge inputs. Float64 inputs are computed in float64, all others in float32.
"""

import torch
from torch import Tensor

__all__ = ["STRIP", "affine", "normalized_rows", "store_rows", "upsampled_rows"]

#: pixels whose values are summed one after the other: more would lose what a sum in fp32 can keep
STRIP = 4096


def _working(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def store_rows(
    rows: Tensor,
    out: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    divisor: float,
    moments: Tensor | None,
    counts: Tensor | None,
    first_slot: int,
) -> None:
    """Rows (B, C, H, W) to `out`; their statistics take a slot for every `STRIP` pixels."""
    if bias is not None or residual is not None or divisor != 1:
        if _in_place(rows, bias, residual):
            # one pass less each than with a sum of its own
            shown = None if bias is None else bias[:, None, None]
            first = shown if residual is None else residual
            out = out.copy_(rows) if first is None else torch.add(rows, first, out=out)
            if shown is not None and residual is not None:
                out += shown
            if divisor != 1:
                out /= divisor
            rows = out
        else:
            total = _working(rows)
            if bias is not None:
                total = total + _working(bias)[:, None, None]
            if residual is not None:
                total = total + _working(residual)
            rows = out.copy_(total / divisor if divisor != 1 else total)
    elif out is not rows:
        rows = out.copy_(rows)
    if moments is not None and counts is not None:
        for item, picture in enumerate(_working(rows)):
            strips = picture.flatten(1).t().split(STRIP)
            for slot, strip in enumerate(strips, first_slot):
                mean, variance = _statistics(strip)
                moments[item, slot, 0] = mean
                moments[item, slot, 1] = variance * len(strip)
                counts[slot] = len(strip)


def _statistics(picture: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of each channel of pixels (N, C)."""
    # what a batch norm gathers: a tenth of the time of var_mean on a CPU where a pixel's channels
    # lie together
    mean, variance = torch.batch_norm_update_stats(picture, None, None, 0.0)
    far = picture.device.type != "cpu" or bool((mean.abs() > 16 * variance.sqrt()).any())
    if far:
        # sums of values far from zero keep little of how they differ
        rest = picture - mean
        more, variance = torch.batch_norm_update_stats(rest, None, None, 0.0)
        mean = mean + more
    return mean, variance


def _in_place(rows: Tensor, *others: Tensor | None) -> bool:
    """Whether nothing has to be computed in another dtype than it is kept in."""
    same = all(other is None or other.dtype == rows.dtype for other in others)
    return same and rows.dtype in (torch.float32, torch.float64)


def affine(
    moments: Tensor,
    counts: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Factor and offset of each channel, `[B, 2, C]`, of the statistics' dtype."""
    batch, slots, _, channels = moments.shape
    # [B, slots, 2, groups, each]
    grouped = moments.double().view(batch, slots, 2, groups, channels // groups)
    number = counts.double()[None, :, None, None]
    total = counts.double().sum() * (channels // groups)
    means = grouped[:, :, 0]
    mean = (means * number).sum((1, 3), keepdim=True) / total
    squares = (grouped[:, :, 1] + (means - mean) ** 2 * number).sum((1, 3), keepdim=True)
    factor = torch.rsqrt(squares / total + eps).expand(batch, 1, groups, channels // groups)
    factor = factor.reshape(batch, channels)
    if weight is not None:
        factor = factor * weight.double()
    mean = mean.expand(batch, 1, groups, channels // groups).reshape(batch, channels)
    offset = -mean * factor
    if bias is not None:
        offset = offset + bias.double()
    return torch.stack((factor, offset), 1).to(moments.dtype)


def normalized_rows(source: Tensor, factors: Tensor, top: int, out: Tensor, silu: bool) -> None:
    """Rows `top`… of `source` (B, C, H, W), normalised into all rows of `out`; zeros outside."""
    height = source.shape[2]
    first, last = max(top, 0), min(top + out.shape[2], height)
    out[:, :, : first - top] = 0
    out[:, :, last - top :] = 0
    rows, inside = source[:, :, first:last], out[:, :, first - top : last - top]
    factor, offset = factors[:, 0, :, None, None], factors[:, 1, :, None, None]
    if _in_place(rows, factor):
        torch.addcmul(offset, rows, factor, out=inside)
        if silu:
            torch.nn.functional.silu(inside, inplace=True)
        return
    rows = _working(rows) * factor + offset
    inside.copy_(torch.nn.functional.silu(rows) if silu else rows)


def upsampled_rows(source: Tensor, top: int, out: Tensor) -> None:
    """Rows `top`… of `source` (B, C, H, W) at twice its size, to all of `out`; zeros outside."""
    height = 2 * source.shape[2]
    first, last = max(top, 0), min(top + out.shape[2], height)
    out[:, :, : first - top] = 0
    out[:, :, last - top :] = 0
    rows = torch.arange(first, last, device=source.device) // 2
    columns = torch.arange(out.shape[3], device=source.device) // 2
    out[:, :, first - top : last - top] = source[:, :, rows][:, :, :, columns]
