"""Tiles of one size for diffusers' AutoencoderKL, where the stock loop leaves slivers at the end.

Stock tiling begins a tile at every stride, so a picture of 1024 with tiles of 768 is cut in one of
768 and one of 448, whose norms see less of the picture than the others'. Here the fewest tiles that
keep the overlap share their side equally: two of 592. That costs less room and less work.
It knows the autoencoder only: nothing of budgets or pipelines. Tiles are no exact computation:
each is normalised by its own statistics (`vae` has the exact one).
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from sdx_patches.compat import is_a

__all__ = ["disable_tiles", "enable_tiles", "equal_spans", "has_equal_tiles", "tiles_of"]

_AUTOENCODER: Final = "diffusers.models.autoencoders.autoencoder_kl.AutoencoderKL"
_STATE: Final = "_sdx_tiles"
# the members that the autoencoder's own encode and decode call where its tiling is on
_LOOPS: Final = ("tiled_decode", "_tiled_encode")
_SETTINGS: Final = ("use_tiling", "tile_sample_min_size", "tile_latent_min_size")

Spans = tuple[tuple[int, int], ...]


def equal_spans(length: int, largest: int) -> Spans:
    """(start, end) of the fewest equal pieces of `length`, neighbours sharing a quarter of one.

    Args:
        length: of the side, in latents.
        largest: of a piece, at least 2; a side that is no longer is one piece.
    """
    if length <= largest:
        return ((0, length),)
    count = 2
    # k pieces of T with k − 1 overlaps of T/4 cover T (3k + 1) / 4
    while (size := -(-4 * length // (3 * count + 1))) > largest:
        count += 1
    starts = [round(i * (length - size) / (count - 1)) for i in range(count)]
    return tuple((start, start + size) for start in starts)


class _Tiles:
    """What was there before, and how large a tile may be; picklable, copied with its model."""

    def __init__(self, vae: Any, before: dict[str, Any]) -> None:
        self.vae, self.before = vae, before
        self.largest = 0
        self.set: dict[str, Any] = {}

    def use(self, tile: int) -> None:
        self.largest = tile
        latents = tile >> (len(self.vae.config.block_out_channels) - 1)
        self.set = dict(zip(_SETTINGS, (True, tile, latents), strict=True))
        for name, value in self.set.items():
            setattr(self.vae, name, value)

    @property
    def in_force(self) -> bool:
        """Whether nobody has set the autoencoder's tiling otherwise since."""
        return all(getattr(self.vae, name) == value for name, value in self.set.items())


class _Loop:
    """Stands before one of the autoencoder's own loops over tiles."""

    def __init__(self, tiles: _Tiles, name: str) -> None:
        self.tiles, self.name = tiles, name

    def __call__(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        vae = self.tiles.vae
        if not self.tiles.in_force:
            return getattr(type(vae), self.name)(vae, tensor, *args, **kwargs)
        if self.name == "_tiled_encode":
            return _encode(vae, tensor)
        return _decode(vae, tensor, *args, **kwargs)


def _decode(vae: Any, latents: Tensor, return_dict: bool = True) -> Any:
    def one(top: int, bottom: int, left: int, right: int) -> Tensor:
        tile = latents[:, :, top:bottom, left:right]
        return vae.decoder(vae.post_quant_conv(tile) if vae.config.use_post_quant_conv else tile)

    largest = vae.tile_latent_min_size
    height, width = (equal_spans(n, largest) for n in latents.shape[2:])
    picture = _blended(one, height, width, _factor(vae))
    if not return_dict:
        return (picture,)
    from diffusers.models.autoencoders.vae import DecoderOutput

    return DecoderOutput(sample=picture)


def _encode(vae: Any, picture: Tensor) -> Tensor:
    factor = _factor(vae)

    def one(top: int, bottom: int, left: int, right: int) -> Tensor:
        part = picture[:, :, top * factor : bottom * factor, left * factor : right * factor]
        encoded: Tensor = vae.encoder(part)
        return vae.quant_conv(encoded) if vae.config.use_quant_conv else encoded

    largest = vae.tile_latent_min_size
    height, width = (equal_spans(n // factor, largest) for n in picture.shape[2:])
    return _blended(one, height, width, 1)


def _factor(vae: Any) -> int:
    """Pixels a latent."""
    return 1 << (len(vae.config.block_out_channels) - 1)


def _blended(
    one: Callable[[int, int, int, int], Tensor], rows: Spans, columns: Spans, scale: int
) -> Tensor:
    """The sum of all tiles, faded into each other where they overlap.

    Args:
        one: computes the tile of (top, bottom, left, right) in latents.
        rows, columns: where tiles begin and end, in latents.
        scale: elements of the result a latent.
    """
    out: Tensor | None = None
    down, across = _fades(rows, scale), _fades(columns, scale)
    for (top, bottom), fade_down in zip(rows, down, strict=True):
        for (left, right), fade_across in zip(columns, across, strict=True):
            tile = one(top, bottom, left, right)
            if out is None:
                shape = (*tile.shape[:2], rows[-1][1] * scale, columns[-1][1] * scale)
                out = tile.new_zeros(shape)
            for fade, shape in ((fade_down, (-1, 1)), (fade_across, (1, -1))):
                if fade is not None:
                    tile *= fade.to(tile).view(shape)
            part = out[:, :, top * scale : bottom * scale, left * scale : right * scale]
            part += tile
    assert out is not None
    return out


def _fades(spans: Spans, scale: int) -> list[Tensor | None]:
    """The weights along each piece; those of two that overlap add up to one."""
    fades: list[Tensor | None] = []
    for index, (start, end) in enumerate(spans):
        fade = torch.ones((end - start) * scale, dtype=torch.float64)
        if index:
            lap = (spans[index - 1][1] - start) * scale
            fade[:lap] = _ramp(lap)
        if index + 1 < len(spans):
            lap = (end - spans[index + 1][0]) * scale
            fade[len(fade) - lap :] = 1 - _ramp(lap)
        fades.append(fade if len(spans) > 1 else None)
    return fades


def _ramp(length: int) -> Tensor:
    return (torch.arange(length, dtype=torch.float64) + 0.5) / max(length, 1)


def enable_tiles(vae: Any, tile: int) -> None:
    """Have an autoencoder work in equal tiles; a second call sets `tile` anew.

    Args:
        vae: a diffusers autoencoder with tiling; one that is no AutoencoderKL keeps its own loop.
        tile: the largest edge of a tile in pixels. A picture that is no larger is computed whole.

    Raises:
        ValueError: a tile of less than two latents.
    """
    least = 2 * _factor(vae)
    if tile < least:
        raise ValueError(f"a tile of {tile} px is too small: at least {least}")
    state, now = vars(vae).get(_STATE), {name: getattr(vae, name) for name in _SETTINGS}
    if state is None:
        state = vars(vae)[_STATE] = _Tiles(vae, now)
        for name in _LOOPS if is_a(vae, _AUTOENCODER) else ():
            # past nn.Module.__setattr__, as the autoencoder may be held to a class of ours
            vars(vae)[name] = _Loop(state, name)
    elif not state.in_force:
        state.before = now
    state.use(tile)


def tiles_of(vae: Any) -> int | None:
    """The largest edge of a tile in pixels where `enable_tiles` is in force, else None."""
    state = vars(vae).get(_STATE)
    return state.largest if isinstance(state, _Tiles) and state.in_force else None


def has_equal_tiles(vae: Any) -> bool:
    """Whether the tiles in force are of one size, not of the autoencoder's own loop."""
    return tiles_of(vae) is not None and _LOOPS[0] in vars(vae)


def disable_tiles(vae: Any) -> None:
    """Give the autoencoder its own loops and settings back; nothing where they are there.

    Settings that somebody has changed since are left as they are.
    """
    state = vars(vae).pop(_STATE, None)
    if not isinstance(state, _Tiles):
        return
    if state.in_force:
        for name, value in state.before.items():
            setattr(vae, name, value)
    for name in _LOOPS:
        vars(vae).pop(name, None)
