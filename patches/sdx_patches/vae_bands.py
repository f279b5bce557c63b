"""The decoder's and the encoder's layers, a band of rows at a time, channels last.

It knows resnets, samplers and heads of an AutoencoderKL; it must not know whose forward it stands
for. Every norm sees the statistics of the whole picture, every convolution the rows that its band
borders on, and only the order of rounding differs from the whole computation.

A tensor's statistics are gathered while it is written, a convolution's bias and the residual are
added in that same pass, and norm and activation are one more: torch's own layers take twelve.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sdx_kernels.ops.group_norm import GroupMoments, store_rows, upsampled_rows

__all__ = ["Rows", "Stored", "Upsampled", "bands", "convolved", "downsampled", "head", "resnet"]

#: elements of one band of a tensor in the mode "low" and otherwise: 32 and 64 MiB in 16 bits. Four
#: bands exist at once. Convolutions of 16 MiB reach 450 to 660 TFLOP/s on an H200 in fp16, of
#: 64 MiB 600 to 730, of whole tensors 690 to 780; and with 16 MiB the host launches more slowly
#: than an H200 computes, 65 to 110 ms for a decode of 1024² in the mode "low"
LOW_ELEMENTS, FAST_ELEMENTS = 1 << 24, 1 << 25


def bands(height: int, row_elements: int, low: bool = True) -> Iterator[tuple[int, int]]:
    """(top, bottom) of bands of an even number of rows, of at most so many elements if they can.

    Args:
        height: rows of the whole.
        row_elements: elements of one row of the widest tensor, batch and channels included.
        low: `LOW_ELEMENTS`; otherwise `FAST_ELEMENTS`.
    """
    most = LOW_ELEMENTS if low else FAST_ELEMENTS
    rows = max(8, most // max(row_elements, 1) // 2 * 2)
    for top in range(0, height, rows):
        yield top, min(top + rows, height)


class Stored:
    """A tensor (B, C, H, W), channels last.

    Attributes:
        moments: its statistics, where they were gathered while it was written.
        own: whether nobody else has it, so that a resnet may write its output there.
    """

    def __init__(
        self, tensor: Tensor, moments: GroupMoments | None = None, own: bool = True
    ) -> None:
        self.tensor, self.moments = tensor.contiguous(memory_format=torch.channels_last), moments
        self.shape, self.own = tensor.shape, own or self.tensor is not tensor

    def __call__(self, top: int, bottom: int) -> Tensor:
        return self.tensor[:, :, top:bottom]


class Upsampled:
    """Rows of an upsampled tensor, computed from the small one each time they are asked for."""

    moments = None
    own = False

    def __init__(self, small: Tensor, upsampler: Any) -> None:
        self.small, self.conv = small, upsampler.conv
        self.weight = _weight(self.conv)
        batch, _, height, width = small.shape
        self.shape = torch.Size((batch, self.conv.out_channels, 2 * height, 2 * width))

    def without_bias(self, top: int, bottom: int) -> Tensor:
        """Rows top…bottom, to which the convolution's bias is still to be added."""
        large = upsampled_rows(self.small, top - 1, bottom + 1)
        return F.conv2d(large, self.weight, None, padding=(0, 1))

    def __call__(self, top: int, bottom: int) -> Tensor:
        rows = self.without_bias(top, bottom)
        out = torch.empty_like(rows, memory_format=torch.channels_last)
        store_rows(rows, out, bias=self.conv.bias)
        return out

    def stored(self, low: bool) -> Stored:
        """All rows, kept."""
        batch, channels, height, width = self.shape
        whole = _empty(self.small, self.shape)
        cuts = list(bands(height, batch * channels * width, low))
        moments = GroupMoments(whole, [(b - t) * width for t, b in cuts])
        for index, (top, bottom) in enumerate(cuts):
            rows = self.without_bias(top, bottom)
            moments.store(index, rows, whole[:, :, top:bottom], bias=self.conv.bias)
        return Stored(whole, moments)


Rows = Stored | Upsampled


def _empty(like: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.empty(
        tuple(shape), dtype=like.dtype, device=like.device, memory_format=torch.channels_last
    )


def _settled(norm: nn.GroupNorm, source: Rows, cuts: list[tuple[int, int]]) -> GroupMoments:
    """The statistics of `source` for this norm, gathered now if nobody has."""
    moments = source.moments
    if moments is None:
        width = source.shape[3]
        rows = source(*cuts[0])
        moments = GroupMoments(rows, [(b - t) * width for t, b in cuts])
        for index, (top, bottom) in enumerate(cuts):
            moments.store(index, rows if index == 0 else source(top, bottom))
    moments.settle(norm.num_groups, norm.weight, norm.bias, norm.eps)
    return moments


def _activated(moments: GroupMoments, source: Rows, top: int, bottom: int) -> Tensor:
    """Rows top - 1…bottom + 1 after norm and SiLU, with rows of zeros beyond the picture."""
    if isinstance(source, Stored):
        return moments.normalized(source.tensor, top - 1, bottom + 1, silu=True)
    first, last = max(top - 1, 0), min(bottom + 1, source.shape[2])
    rows = source(first, last)
    return moments.normalized(rows, top - 1 - first, bottom + 1 - first, silu=True)


def _weight(conv: Any) -> Tensor:
    weight: Tensor = conv.weight
    return weight.contiguous(memory_format=torch.channels_last)


def resnet(block: Any, source: Rows, low: bool) -> Stored:
    """A ResnetBlock2D without time embedding.

    Two tensors at most: the output takes the input's place, or that of the hidden states where the
    input has another number of channels or is somebody else's too.
    """
    batch, channels, height, width = source.shape
    middle = block.conv1.out_channels
    cuts = list(bands(height, batch * width * max(channels, middle), low))
    pixels = [(bottom - top) * width for top, bottom in cuts]
    before = _settled(block.norm1, source, cuts)
    weight = _weight(block.conv1)
    hidden: Tensor | None = None
    between: GroupMoments | None = None
    for index, (top, bottom) in enumerate(cuts):
        rows = F.conv2d(_activated(before, source, top, bottom), weight, None, padding=(0, 1))
        if hidden is None:
            hidden = _empty(rows, (batch, middle, height, width))
            between = GroupMoments(hidden, pixels)
        assert between is not None
        between.store(index, rows, hidden[:, :, top:bottom], bias=block.conv1.bias)
        del rows
    assert hidden is not None
    assert between is not None
    norm, shortcut = block.norm2, block.conv_shortcut
    between.settle(norm.num_groups, norm.weight, norm.bias, norm.eps)
    in_place = isinstance(source, Stored) and source.own and shortcut is None
    out = source.tensor if in_place and isinstance(source, Stored) else hidden
    after = GroupMoments(out, pixels)
    weight, bias = _weight(block.conv2), block.conv2.bias
    if shortcut is not None and shortcut.bias is not None:
        # both are added in one pass, and rounded once
        wide = torch.promote_types(shortcut.bias.dtype, torch.float32)
        bias = shortcut.bias.to(wide) + (0 if bias is None else bias.to(wide))

    def finish(index: int, rows: Tensor) -> None:
        top, bottom = cuts[index]
        residual = source(top, bottom)
        if shortcut is not None:
            residual = F.conv2d(residual, shortcut.weight)
        after.store(
            index,
            rows,
            out[:, :, top:bottom],
            bias=bias,
            residual=residual,
            divisor=float(block.output_scale_factor),
        )

    stored = Stored(hidden, between)
    waiting: Tensor | None = None
    for index, (top, bottom) in enumerate(cuts):
        activated = _activated(between, stored, top, bottom)
        # only now, since this band has read the last row of the one before
        if waiting is not None:
            finish(index - 1, waiting)
        waiting = F.conv2d(activated, weight, None, padding=(0, 1))
        del activated
    assert waiting is not None
    finish(len(cuts) - 1, waiting)
    return Stored(out, after)


def head(norm: nn.GroupNorm, conv: Any, source: Rows, low: bool) -> Tensor:
    """The last norm, activation and convolution."""
    batch, channels, height, width = source.shape
    cuts = list(bands(height, batch * channels * width, low))
    last = _settled(norm, source, cuts)
    weight = _weight(conv)
    out: Tensor | None = None
    for top, bottom in cuts:
        rows = F.conv2d(_activated(last, source, top, bottom), weight, conv.bias, padding=(0, 1))
        if out is None:
            out = rows.new_empty((batch, conv.out_channels, height, width))
        out[:, :, top:bottom] = rows
    assert out is not None
    return out


def convolved(conv: Any, sample: Tensor, low: bool) -> Stored:
    """A 3 x 3 convolution with padding 1."""
    batch, _, height, width = sample.shape
    cuts = list(bands(height, batch * conv.out_channels * width, low))
    pieces = (
        (sample[:, :, max(t - 1, 0) : min(b + 1, height)], t - max(t - 1, 0)) for t, b in cuts
    )

    def rows(index: int) -> Tensor:
        piece, skipped = next(pieces)
        top, bottom = cuts[index]
        # the padding of the band's own edges is cut off inside the picture
        return F.conv2d(piece, conv.weight, None, padding=1)[:, :, skipped : skipped + bottom - top]

    return _gathered(rows, cuts, conv.bias)


def downsampled(downsampler: Any, large: Tensor, low: bool) -> Stored:
    """Half the size, by a 3 x 3 convolution of stride 2 over one row and column of padding."""
    batch, channels, height, width = large.shape
    cuts = list(bands(height // 2, 2 * batch * channels * width, low))

    def rows(index: int) -> Tensor:
        top, bottom = cuts[index]
        # output row r reads rows 2r…2r + 2; past the last band the module pads by itself
        part: Tensor = downsampler(large[:, :, 2 * top : min(2 * bottom + 1, height)])
        return part[:, :, : bottom - top]

    return _gathered(rows, cuts, None)


def _gathered(
    rows: Callable[[int], Tensor], cuts: list[tuple[int, int]], bias: Tensor | None
) -> Stored:
    out: Tensor | None = None
    moments: GroupMoments | None = None
    for index, (top, bottom) in enumerate(cuts):
        part = rows(index)
        if out is None:
            batch, channels, _, width = part.shape
            out = _empty(part, (batch, channels, cuts[-1][1], width))
            moments = GroupMoments(out, [(b - t) * width for t, b in cuts])
        assert moments is not None
        moments.store(index, part, out[:, :, top:bottom], bias=bias)
    assert out is not None
    return Stored(out, moments)
