"""Decode and encode of diffusers' AutoencoderKL in bands of rows: exact, no seams, less room.

It knows the decoder's and the encoder's blocks; it must not know budgets or pipelines. Classic
tiles normalise each tile by itself, which is what makes their seams. Here every GroupNorm sees the
statistics of the whole picture, every convolution the rows that its band borders on, and only the
order of rounding differs from the whole computation.

Of a level, two tensors are alive (a block's input and its hidden states) instead of five: the
output takes the input's place, and norms, activations and convolutions exist a band at a time.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "BandedDecoder",
    "BandedEncoder",
    "bands_of",
    "disable_bands",
    "enable_bands",
    "unsupported",
]

#: elements of one band of a tensor: 16 MiB in 16 bits; about six of them exist at once
BAND_ELEMENTS = 1 << 23

Rows = Callable[[int, int], Tensor]


def bands(height: int, row_elements: int) -> Iterator[tuple[int, int]]:
    """(top, bottom) of bands of an even number of rows, of at most `BAND_ELEMENTS` if they can.

    Args:
        height: rows of the whole.
        row_elements: elements of one row of the widest tensor, batch and channels included.
    """
    rows = max(8, BAND_ELEMENTS // max(row_elements, 1) // 2 * 2)
    for top in range(0, height, rows):
        yield top, min(top + rows, height)


class _Norm:
    """A GroupNorm whose statistics are gathered band by band.

    Bands are merged by the pairwise update of Chan, Golub and LeVeque (1983) in float64; summing
    squares instead would cancel where a group's mean is large beside its deviation.
    """

    def __init__(self, norm: nn.GroupNorm) -> None:
        self.norm = norm
        self.count = 0
        self.mean: Tensor | None = None
        self.squares: Tensor | None = None
        self.applied: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def add(self, band: Tensor) -> None:
        """Takes a band (B, C, rows, W) into the statistics."""
        grouped = band.float().reshape(band.shape[0], self.norm.num_groups, -1)
        variance, mean = torch.var_mean(grouped, dim=-1, correction=0)
        count = grouped.shape[-1]
        mean, squares = mean.double(), variance.double() * count
        if self.mean is None or self.squares is None:
            self.mean, self.squares = mean, squares
        else:
            delta, total = mean - self.mean, self.count + count
            self.squares = self.squares + squares + delta**2 * (self.count * count / total)
            self.mean = self.mean + delta * (count / total)
        self.count += count

    def __call__(self, band: Tensor) -> Tensor:
        """A band (B, C, rows, W), normalised and put through SiLU."""
        batch, channels = band.shape[:2]
        if self.applied is None:
            assert self.mean is not None
            assert self.squares is not None
            each = channels // self.norm.num_groups
            mean, variance = (
                t.float().repeat_interleave(each, dim=1).flatten()
                for t in (self.mean, self.squares / self.count)
            )
            weight, bias = (p.float().repeat(batch) for p in (self.norm.weight, self.norm.bias))
            self.applied = mean, variance, weight, bias
        mean, variance, weight, bias = self.applied
        # with fixed statistics a batch norm over batch·channels is this norm, in one pass and
        # with fp32 inside; a norm written out would need two fp32 copies of the band
        flat = band.reshape(1, batch * channels, *band.shape[2:])
        out = F.batch_norm(flat, mean, variance, weight, bias, eps=self.norm.eps)
        return F.silu(out, inplace=True).view(band.shape)


def _convolve(conv: nn.Module, rows: Rows, top: int, bottom: int, height: int) -> Tensor:
    """Rows top…bottom of a 3 x 3 convolution with padding 1 over `rows` of `height`."""
    first, last = max(top - 1, 0), min(bottom + 1, height)
    # the module pads the band's own edges with zeros: right at the picture's, cut off inside it
    return conv(rows(first, last))[:, :, top - first : bottom - first]


class _Stored:
    """Rows of a tensor; `own` where the resnet may write its output into it."""

    def __init__(self, tensor: Tensor, own: bool) -> None:
        self.tensor, self.own = tensor, own
        self.shape = tensor.shape

    def __call__(self, top: int, bottom: int) -> Tensor:
        return self.tensor[:, :, top:bottom]


class _Upsampled:
    """Rows of an upsampled tensor, computed from the small one each time they are asked for."""

    def __init__(self, small: Tensor, upsampler: Any) -> None:
        self.small, self.upsampler = small, upsampler
        self.own = False
        batch, _, height, width = small.shape
        self.shape = torch.Size((batch, upsampler.out_channels, 2 * height, 2 * width))

    def __call__(self, top: int, bottom: int) -> Tensor:
        first = max((top - 1) // 2, 0)
        last = min(bottom // 2 + 1, self.small.shape[2])
        # one upsampled row more on each side, for the convolution
        large = self.upsampler(self.small[:, :, first:last])
        return large[:, :, top - 2 * first : bottom - 2 * first]


_Source = _Stored | _Upsampled


def _resnet(block: Any, source: _Source) -> _Stored:
    """A ResnetBlock2D without time embedding; the output takes the input's place where it may."""
    batch, channels, height, width = source.shape
    middle = block.conv1.out_channels
    cuts = list(bands(height, batch * width * max(channels, middle)))
    before, between = _Norm(block.norm1), _Norm(block.norm2)
    for top, bottom in cuts:
        before.add(source(top, bottom))
    some = source(0, 1)
    hidden = some.new_empty((batch, middle, height, width))
    shortcut = block.conv_shortcut
    out: Tensor | None = None
    if shortcut is not None or not source.own or not isinstance(source, _Stored):
        out = some.new_empty((batch, block.conv2.out_channels, height, width))
    del some
    for top, bottom in cuts:
        part = _convolve(block.conv1, lambda a, b: before(source(a, b)), top, bottom, height)
        between.add(part)
        hidden[:, :, top:bottom] = part
        if out is not None:
            # now, because the source may have to be computed again for it
            rows = source(top, bottom)
            out[:, :, top:bottom] = rows if shortcut is None else shortcut(rows)
    if out is None:
        assert isinstance(source, _Stored)
        out = source.tensor
    for top, bottom in cuts:
        part = _convolve(block.conv2, lambda a, b: between(hidden[:, :, a:b]), top, bottom, height)
        kept = out[:, :, top:bottom]
        kept += part
        if block.output_scale_factor != 1:
            kept /= block.output_scale_factor
    return _Stored(out, own=True)


def _whole(source: _Source) -> Tensor:
    if isinstance(source, _Stored):
        return source.tensor
    batch, channels, height, width = source.shape
    whole: Tensor | None = None
    for top, bottom in bands(height, batch * channels * width):
        part = source(top, bottom)
        if whole is None:
            whole = part.new_empty(source.shape)
        whole[:, :, top:bottom] = part
    assert whole is not None
    return whole


def _head(norm: nn.GroupNorm, conv: Any, source: _Source) -> Tensor:
    """The last norm, activation and convolution."""
    batch, channels, height, width = source.shape
    last = _Norm(norm)
    cuts = list(bands(height, batch * channels * width))
    for top, bottom in cuts:
        last.add(source(top, bottom))
    out: Tensor | None = None
    for top, bottom in cuts:
        part = _convolve(conv, lambda a, b: last(source(a, b)), top, bottom, height)
        if out is None:
            out = part.new_empty((batch, conv.out_channels, height, width))
        out[:, :, top:bottom] = part
    assert out is not None
    return out


class _Banded:
    """Stands before a decoder's or encoder's own forward; picklable, copied with its model.

    Args:
        module: the decoder or encoder.
        low: compute an upsampled tensor again for each pass over it instead of keeping it.
    """

    def __init__(self, module: Any, low: bool = True) -> None:
        self.module, self.low = module, low
        self.copied = False

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "copied": True}

    def __call__(self, sample: Tensor, *rest: Any, **named: Any) -> Tensor:
        """As the module's own forward; training and conditioning go to that one."""
        conditioned = any(value is not None for value in (*rest, *named.values()))
        training = torch.is_grad_enabled() and (
            sample.requires_grad or any(p.requires_grad for p in self.module.parameters())
        )
        if conditioned or training:
            return type(self.module).forward(self.module, sample, *rest, **named)
        return self.run(sample)

    def run(self, sample: Tensor) -> Tensor:
        """The forward in bands."""
        raise NotImplementedError


class BandedDecoder(_Banded):
    """Stands before the forward of an AutoencoderKL's decoder."""

    def run(self, sample: Tensor) -> Tensor:
        decoder = self.module
        source: _Source = _Stored(decoder.mid_block(decoder.conv_in(sample), None), own=True)
        for block in decoder.up_blocks:
            for resnet in block.resnets:
                source = _resnet(resnet, source)
            for upsampler in block.upsamplers or ():
                source = _Upsampled(_whole(source), upsampler)
                if not self.low:
                    source = _Stored(_whole(source), own=True)
        return _head(decoder.conv_norm_out, decoder.conv_out, source)


class BandedEncoder(_Banded):
    """Stands before the forward of an AutoencoderKL's encoder."""

    def run(self, sample: Tensor) -> Tensor:
        encoder = self.module
        source: _Source = _Stored(self._first(sample), own=True)
        for block in encoder.down_blocks:
            for resnet in block.resnets:
                source = _resnet(resnet, source)
            for downsampler in block.downsamplers or ():
                source = _Stored(self._smaller(downsampler, _whole(source)), own=True)
        middle = encoder.mid_block(_whole(source))
        return _head(encoder.conv_norm_out, encoder.conv_out, _Stored(middle, own=True))

    def _first(self, sample: Tensor) -> Tensor:
        conv = self.module.conv_in
        batch, _, height, width = sample.shape
        out: Tensor | None = None
        for top, bottom in bands(height, batch * conv.out_channels * width):
            part = _convolve(conv, lambda a, b: sample[:, :, a:b], top, bottom, height)
            if out is None:
                out = part.new_empty((batch, conv.out_channels, height, width))
            out[:, :, top:bottom] = part
        assert out is not None
        return out

    def _smaller(self, downsampler: Any, large: Tensor) -> Tensor:
        """Half the size, by a 3 x 3 convolution of stride 2 over one row and column of padding."""
        batch, channels, height, width = large.shape
        out: Tensor | None = None
        for top, bottom in bands(height // 2, 2 * batch * channels * width):
            # output row r reads rows 2r…2r + 2; past the last band the module pads by itself
            part = downsampler(large[:, :, 2 * top : min(2 * bottom + 1, height)])
            part = part[:, :, : bottom - top]
            if out is None:
                out = part.new_empty((batch, part.shape[1], height // 2, part.shape[3]))
            out[:, :, top:bottom] = part
        assert out is not None
        return out


_KINDS: dict[str, type[_Banded]] = {"decoder": BandedDecoder, "encoder": BandedEncoder}


def unsupported(vae: Any) -> str:
    """Why this autoencoder cannot be run in bands; "" where it can."""
    for name in _KINDS:
        half: Any = getattr(vae, name, None)
        if type(half).__name__ != name.capitalize():
            return f"its {name} is {type(half).__name__}, not diffusers' {name.capitalize()}"
        blocks = list(half.up_blocks if name == "decoder" else half.down_blocks)
        wanted = "UpDecoderBlock2D" if name == "decoder" else "DownEncoderBlock2D"
        for block in blocks:
            if type(block).__name__ != wanted:
                return f"its {name} has a {type(block).__name__}, which is not {wanted}"
            if any(not _plain(resnet) for resnet in block.resnets):
                return f"its {name} has resnets with embeddings or other norms"
        there = vars(half).get("forward")
        if there is not None and not isinstance(there, _Banded):
            return f"the forward of its {name} was replaced by {type(there).__name__}"
        if type(half.conv_norm_out) is not nn.GroupNorm:
            return f"its {name} ends in a {type(half.conv_norm_out).__name__}"
        scalers = "upsamplers" if name == "decoder" else "downsamplers"
        for block in blocks:
            for scaler in getattr(block, scalers) or ():
                if not _scales_plainly(scaler, name):
                    return f"its {name} scales in a way of its own"
    return ""


def _plain(resnet: Any) -> bool:
    return (
        type(resnet).__name__ == "ResnetBlock2D"
        and resnet.time_emb_proj is None
        and resnet.time_embedding_norm in ("default", "group")
        and resnet.upsample is None
        and resnet.downsample is None
        and isinstance(resnet.nonlinearity, nn.SiLU)
        and type(resnet.norm1) is type(resnet.norm2) is nn.GroupNorm
        and all(conv.kernel_size == (3, 3) for conv in (resnet.conv1, resnet.conv2))
    )


def _scales_plainly(scaler: Any, half: str) -> bool:
    plain = scaler.use_conv and scaler.norm is None and scaler.conv.kernel_size == (3, 3)
    if half == "encoder":
        return bool(plain and scaler.padding == 0)
    return bool(plain and not scaler.use_conv_transpose and scaler.interpolate)


def enable_bands(vae: Any, low: bool = True) -> None:
    """Have an AutoencoderKL decode and encode in bands of rows; a second call sets `low` anew.

    Args:
        vae: a diffusers AutoencoderKL.
        low: less room and more time: upsampled tensors are computed again where they are read.

    Raises:
        ValueError: it is built of other blocks, or another tool has replaced its forward.
    """
    reason = unsupported(vae)
    if reason:
        raise ValueError(f"this VAE cannot be run in bands: {reason}")
    for name, kind in _KINDS.items():
        half = getattr(vae, name)
        # past nn.Module.__setattr__, which costs nothing here but would register a module
        vars(half)["forward"] = kind(half, low)


def bands_of(vae: Any) -> str | None:
    """ "low" or "fast" where the autoencoder runs in bands, else None."""
    there = vars(getattr(vae, "decoder", vae)).get("forward")
    if not isinstance(there, _Banded):
        return None
    return "low" if there.low else "fast"


def copied_bands(vae: Any) -> bool:
    """Whether the autoencoder runs in bands only because it is a copy of one that did.

    Whoever switched them on knows the original, so that nobody would switch them off here.
    """
    there = vars(getattr(vae, "decoder", vae)).get("forward")
    return isinstance(there, _Banded) and there.copied


def disable_bands(vae: Any) -> None:
    """Give the autoencoder its own forwards back; nothing happens where they are there."""
    for name in _KINDS:
        half = getattr(vae, name, None)
        if half is not None and isinstance(vars(half).get("forward"), _Banded):
            del vars(half)["forward"]
