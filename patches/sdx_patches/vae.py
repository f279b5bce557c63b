"""Decode and encode of diffusers' AutoencoderKL in bands of rows: exact, no seams, less room.

It knows the decoder's and the encoder's blocks; it must not know budgets or pipelines. Classic
tiles normalise each tile by itself, which is what makes their seams. Here every GroupNorm sees the
statistics of the whole picture (`vae_bands`).

Of a level, two tensors are alive (a block's input and its hidden states) instead of five: the
output takes the input's place, and norms, activations and convolutions exist a band at a time.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from sdx_kernels.ops.group_norm import implementation
from sdx_patches.session import PatchSession, is_patched, settings_of
from sdx_patches.vae_bands import Rows, Stored, Upsampled, convolved, downsampled, head, resnet

__all__ = [
    "BandedDecoder",
    "BandedEncoder",
    "bands_of",
    "chosen_bands",
    "copied_bands",
    "disable_bands",
    "enable_bands",
    "install",
    "says",
    "unsupported",
]


class _Banded:
    """Stands before a decoder's or encoder's own forward; picklable, copied with its model.

    Args:
        module: the decoder or encoder.
        low: compute an upsampled tensor again for each pass over it instead of keeping it.
        patch: a patch's own, which serves while the module is patched and fused kernels are wanted.

    Attributes:
        under: the patch's own that this one stands before.
        found: the module's own bound forward, where accelerate has left it on the instance.
        copied: whether it came with a copy of its module.
    """

    def __init__(self, module: Any, low: bool = True, patch: bool = False) -> None:
        self.module, self.low, self.patch = module, low, patch
        self.under: _Banded | None = None
        self.found: Any = None
        self.copied = False

    @property
    def active(self) -> bool:
        """Whether it serves at all."""
        return not self.patch or (is_patched(self.module) and settings_of(self.module).fused)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "copied": True}

    def __call__(self, sample: Tensor, *rest: Any, **named: Any) -> Tensor:
        """As the module's own forward, to which all goes that bands do not serve."""
        if torch.compiler.is_compiling() or not self._serves(sample, rest, named):
            return type(self.module).forward(self.module, sample, *rest, **named)
        return self.run(sample)

    def _serves(self, sample: Tensor, rest: tuple[Any, ...], named: dict[str, Any]) -> bool:
        """Neither conditioning, nor training, nor layers that are not as bands take them."""
        if not self.active:
            return False
        if any(value is not None for value in (*rest, *named.values())):
            return False
        # a picture that is too small for the levels: the module's own words are better
        if sample.dim() != 4 or min(sample.shape[2:]) < self.least:
            return False
        # the meta device has no autocast to ask for
        if not sample.is_meta and torch.is_autocast_enabled(sample.device.type):
            return False
        if torch._C._functorch.is_functorch_wrapped_tensor(sample):
            return False
        parameters = list(self.module.parameters())
        if torch.is_grad_enabled() and any(t.requires_grad for t in (sample, *parameters)):
            return False
        ours = (sample.device, sample.dtype)
        if any((p.device, p.dtype) != ours for p in parameters):
            return False
        hooked = module_hooks._global_forward_hooks or module_hooks._global_forward_pre_hooks
        return not (hooked or _odd(self.module))

    @property
    def least(self) -> int:
        """The smallest height and width that every level can work with."""
        return 1

    def run(self, sample: Tensor) -> Tensor:
        """The forward in bands."""
        raise NotImplementedError


def _is_its_own(layer: nn.Module, forward: Any) -> bool:
    """Whether an instance's forward is the class's; accelerate leaves it there so."""
    if forward is None:
        return True
    bound = getattr(forward, "__func__", None), getattr(forward, "__self__", None)
    return bound == (type(layer).forward, layer)


def _intercepted(layer: nn.Module) -> bool:
    """Whether a layer's call would run more than the layer, which reading its weights leaves out.

    Offloading, casting and compiling put themselves there, and so do hooks.
    """
    own, stock = vars(layer), type(layer).forward
    if not _is_its_own(layer, own.get("forward")):
        return True
    if own.get("_compiled_call_impl") is not None:
        return True
    if own.get("_forward_hooks") or own.get("_forward_pre_hooks"):
        return True
    # somebody's own forward in the class
    home = getattr(stock, "__globals__", {}).get("__name__", "")
    return home.partition(".")[0] not in ("diffusers", "torch")


def _odd(half: Any) -> str:
    """What of a decoder or encoder is not as bands take it, "" for nothing.

    Looked at before each call too, since layers change: adapters, paddings that make seamless
    textures, hooks.
    """
    middle = half.mid_block
    if type(middle).__name__ != "UNetMidBlock2D":
        return f"its middle is {type(middle).__name__}, not UNetMidBlock2D"
    up = hasattr(half, "up_blocks")
    blocks, wanted = (
        (half.up_blocks, "UpDecoderBlock2D") if up else (half.down_blocks, "DownEncoderBlock2D")
    )
    layers: list[nn.Module] = [
        middle, half.conv_in, half.conv_norm_out, half.conv_act, half.conv_out,
    ]  # fmt: skip
    for block in blocks:
        if type(block).__name__ != wanted:
            return f"it has a {type(block).__name__}, which is not {wanted}"
        layers.append(block)
    for each in (*middle.resnets, *(r for block in blocks for r in block.resnets)):
        if not _plain(each):
            return "it has resnets with embeddings or other norms, adapters or other layers"
        layers += (each, each.norm1, each.conv1, each.norm2, each.conv2)
        layers += (each.nonlinearity, each.dropout)
        layers += () if each.conv_shortcut is None else (each.conv_shortcut,)
    for block in blocks:
        for scaler in (block.upsamplers if up else block.downsamplers) or ():
            if not _scales_plainly(scaler, up):
                return "it scales in a way of its own"
            layers += (scaler, scaler.conv)
    if type(half.conv_norm_out) is not nn.GroupNorm or type(half.conv_act) is not nn.SiLU:
        return f"it ends in {type(half.conv_norm_out).__name__}, {type(half.conv_act).__name__}"
    if not (_convolves(half.conv_in, 3) and _convolves(half.conv_out, 3)):
        return "its first or last convolution is another one"
    # attention is called as it is, with whatever stands before it
    if any(_intercepted(layer) for layer in layers):
        return "somebody has put a hook or a forward before one of its layers"
    return ""


def _convolves(conv: Any, kernel: int, stride: int = 1, padding: int | None = None) -> bool:
    padding = kernel // 2 if padding is None else padding
    return (
        type(conv) is nn.Conv2d
        and conv.kernel_size == (kernel, kernel)
        and conv.stride == (stride, stride)
        and conv.padding == (padding, padding)
        and conv.dilation == (1, 1)
        and conv.groups == 1
        and conv.padding_mode == "zeros"
    )


def _plain(resnet: Any) -> bool:
    return (
        type(resnet).__name__ == "ResnetBlock2D"
        and resnet.time_emb_proj is None
        and resnet.time_embedding_norm in ("default", "group")
        and resnet.upsample is None
        and resnet.downsample is None
        and type(resnet.nonlinearity) is nn.SiLU
        and (resnet.dropout.p == 0 or not resnet.dropout.training)
        and type(resnet.norm1) is type(resnet.norm2) is nn.GroupNorm
        and _convolves(resnet.conv1, 3)
        and _convolves(resnet.conv2, 3)
        and (resnet.conv_shortcut is None or _convolves(resnet.conv_shortcut, 1))
    )


def _scales_plainly(scaler: Any, up: bool) -> bool:
    if not (scaler.use_conv and scaler.norm is None):
        return False
    if not up:
        return scaler.padding == 0 and _convolves(scaler.conv, 3, stride=2, padding=0)
    plain = scaler.interpolate and not scaler.use_conv_transpose
    return bool(plain and _convolves(scaler.conv, 3))


class BandedDecoder(_Banded):
    """Stands before the forward of an AutoencoderKL's decoder."""

    def run(self, sample: Tensor) -> Tensor:
        decoder = self.module
        source: Rows = _middle(
            decoder.mid_block, convolved(decoder.conv_in, sample, self.low), self.low
        )
        for block in decoder.up_blocks:
            for layer in block.resnets:
                source = resnet(layer, source, self.low)
            for upsampler in block.upsamplers or ():
                source = Upsampled(_tensor(source, self.low), upsampler)
                if not self.low:
                    source = source.stored(self.low)
        return head(decoder.conv_norm_out, decoder.conv_out, source, self.low)


class BandedEncoder(_Banded):
    """Stands before the forward of an AutoencoderKL's encoder."""

    @property
    def least(self) -> int:
        """One pixel of the smallest level."""
        return int(2 ** sum(bool(block.downsamplers) for block in self.module.down_blocks))

    def run(self, sample: Tensor) -> Tensor:
        encoder = self.module
        source: Rows = convolved(encoder.conv_in, sample, self.low)
        for block in encoder.down_blocks:
            for layer in block.resnets:
                source = resnet(layer, source, self.low)
            for downsampler in block.downsamplers or ():
                source = downsampled(downsampler, _tensor(source, self.low), self.low)
        source = _middle(encoder.mid_block, source, self.low)
        return head(encoder.conv_norm_out, encoder.conv_out, source, self.low)


def _tensor(source: Rows, low: bool) -> Tensor:
    return source.tensor if isinstance(source, Stored) else source.stored(low).tensor


def _middle(block: Any, source: Rows, low: bool) -> Stored:
    """A UNetMidBlock2D: its resnets here, its attention by its own processor."""
    first, *others = block.resnets
    out = resnet(first, source, low)
    for attention, layer in zip(block.attentions, others, strict=True):
        if attention is not None:
            # a hook may have kept it, or a processor given back its input
            out = Stored(attention(out.tensor, temb=None), own=False)
        out = resnet(layer, out, low)
    return out


_KINDS: dict[str, type[_Banded]] = {"decoder": BandedDecoder, "encoder": BandedEncoder}


def unsupported(vae: Any) -> str:
    """Why this autoencoder cannot be run in bands now; "" where it can."""
    if {"decode", "encode"} & vars(vae).keys():
        return "its decode or encode was replaced"
    for name in _KINDS:
        half: Any = getattr(vae, name, None)
        if type(half).__name__ != name.capitalize():
            return f"its {name} is {type(half).__name__}, not diffusers' {name.capitalize()}"
        if vars(half).get("_compiled_call_impl") is not None:
            return f"its {name} is compiled"
        there = vars(half).get("forward")
        if not isinstance(there, _Banded) and not _is_its_own(half, there):
            return f"the forward of its {name} was replaced by {type(there).__name__}"
        if odd := _odd(half):
            return f"{odd} (its {name})"
    return ""


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
        there, ours = _forward(half), kind(half, low)
        # past nn.Module.__setattr__, which costs nothing here but would register a module
        _put(half, ours)
        if there is not None:
            ours.under = there if there.patch else there.under
            ours.found = there.found


def disable_bands(vae: Any) -> None:
    """Undo `enable_bands`; what a patch has put there stays."""
    for name in _KINDS:
        half: Any = getattr(vae, name, None)
        there = None if half is None else _forward(half)
        if there is None or there.patch:
            continue
        _take(half, there)
        if there.under is not None:
            vars(half)["forward"] = there.under


@dataclass
class _Uninstall:
    """Undo entry of one half; picklable."""

    half: nn.Module

    def __call__(self) -> None:
        there = _forward(self.half)
        if there is not None and there.patch:
            _take(self.half, there)
        elif there is not None:
            there.under = None


def install(vae: Any, session: PatchSession) -> None:
    """Have a patched AutoencoderKL work in bands, "fast", while its settings want fused kernels.

    On an H200 that is faster than the whole and takes 0.4 of its room. Nothing happens where bands
    do not work. A forward that outlives the patch in somebody's hands is the module's own.
    """
    if type(vae).__name__ != "AutoencoderKL" or unsupported(vae):
        return
    for name, kind in _KINDS.items():
        half = getattr(vae, name)
        site, there = session.claim(half), _forward(half)
        if there is not None and (there.patch or there.under is not None):
            continue
        ours = kind(half, low=False, patch=True)
        if there is not None:
            there.under, ours.found = ours, there.found
        else:
            _put(half, ours)
        undo = _Uninstall(half)
        site.undo.append(undo)
        # a failure puts the site back as it was before this entry
        session.on_failure(undo)


def _put(half: nn.Module, ours: _Banded) -> None:
    ours.found = vars(half).get("forward")
    vars(half)["forward"] = ours


def _take(half: nn.Module, ours: _Banded) -> None:
    del vars(half)["forward"]
    if ours.found is not None:
        vars(half)["forward"] = ours.found


def _forward(half: nn.Module) -> _Banded | None:
    there = vars(half).get("forward")
    return there if isinstance(there, _Banded) else None


def bands_of(vae: Any) -> str | None:
    """ "low" or "fast" where the autoencoder runs in bands, else None."""
    there = _forward(getattr(vae, "decoder", vae))
    if there is None or not there.active:
        return None
    return "low" if there.low else "fast"


def says(vae: Any) -> str:
    """How a patched AutoencoderKL decodes and encodes now, and why, for people."""
    mode, reason = bands_of(vae), unsupported(vae)
    if mode is None:
        return f"its own forward: {reason or 'fused kernels are not wanted'}"
    if reason:
        return f"its own forward: {reason}"
    first = next(vae.decoder.parameters())
    return f"bands of rows ({mode}), norms fused ({implementation(first.device, first.dtype)})"


def chosen_bands(vae: Any) -> bool:
    """Whether `enable_bands` was called, rather than a patch."""
    there = _forward(getattr(vae, "decoder", vae))
    return there is not None and not there.patch


def copied_bands(vae: Any) -> bool:
    """Whether the autoencoder runs in chosen bands only because it is a copy of one that did.

    Whoever switched them on knows the original, so that nobody would switch them off here.
    """
    there = _forward(getattr(vae, "decoder", vae))
    return there is not None and there.copied and not there.patch
