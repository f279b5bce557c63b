"""Remembers the choice of plain calls, so that a UNet step does not make it 140 times over.

Checking and choosing cost 30 µs and more a call on top of torch's own 10; an SDXL step of 60 ms has
140 calls, and a text encoder 12 to 32 with a causal mask or a padded one. What is remembered is a
pure function of its key, so bits do not depend on it.
"""

import os
from dataclasses import dataclass, field

import torch

from sdx_kernels import target
from sdx_kernels.bias import (
    AttentionBias,
    Band,
    KeyPaddingMask,
    LowerTriangularFromBottomRightMask,
    LowerTriangularMask,
)
from sdx_kernels.checks import AttentionInputs, Signature
from sdx_kernels.registry import Again, Choice, Impl, launches

__all__ = ["Known", "forget", "plain_key", "recall", "remember"]

#: shapes of one process are few; a program that sweeps sizes must not grow without end
_MOST = 4096

Key = tuple[object, ...]

#: masks that are all in their class, and in the lengths
_TRIANGLES = (LowerTriangularMask, LowerTriangularFromBottomRightMask)

Bias = torch.Tensor | AttentionBias | None


@dataclass(frozen=True)
class Known:
    """A settled call without dropout, gradient or autocast: run it with new tensors.

    Attributes:
        again: launches that are compiled, by all that decides them besides the settled call.
    """

    signature: Signature
    target: target.Target
    scale: float
    impl: Impl
    choice: Choice
    band: Band | None = None
    again: dict[Key, Again] = field(default_factory=dict, compare=False)

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
        attn_bias: Bias = None,
    ) -> torch.Tensor:
        """The output, `[B, Mq, H, Kv]`."""
        factor = self.scale if scale is None else float(scale)
        plain = self.impl.plain
        if plain is not None and attn_bias is None:
            out = plain(query, key, value, factor)
        else:
            out = self._bound(query, key, value, factor, attn_bias)
        launches[self.choice.name] += 1
        return out

    def _bound(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        attn_bias: Bias,
    ) -> torch.Tensor:
        """By a launch that is compiled, if there is one for such tensors."""
        if self.impl.bind is None:
            out: torch.Tensor = self.impl.run(self._inputs(query, key, value, scale, attn_bias))[0]
            return out
        mask = attn_bias.mask if isinstance(attn_bias, KeyPaddingMask) else attn_bias
        tensor = mask if isinstance(mask, torch.Tensor) else None
        where = _where(query, key, value, tensor, scale)
        again = None if where is None else self.again.get(where)
        # a binary is loaded on one device, and started on the current one
        if again is not None and query.device.index == torch.cuda.current_device():
            return again(query, key, value, tensor, scale)
        out, again = self.impl.bind(self._inputs(query, key, value, scale, attn_bias))
        if again is not None and where is not None:
            if len(self.again) >= _MOST:
                self.again.clear()
            self.again[where] = again
        return out

    def _inputs(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        attn_bias: Bias,
    ) -> AttentionInputs:
        s = self.signature
        dense = attn_bias if isinstance(attn_bias, torch.Tensor) else None
        exists = None
        if isinstance(attn_bias, KeyPaddingMask):
            exists = attn_bias.mask.expand(s.batch, s.keys)
        return AttentionInputs(
            query,
            key,
            value,
            dense,
            self.band,
            None,
            exists,
            None,
            None,
            scale,
            s.output_dtype,
            (s.batch, s.queries, s.heads, s.value_dim),
            type(attn_bias),
            s,
        )


def _where(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> Key | None:
    """What decides a launch beside shapes and dtypes; None for tensors that need a look each time.

    The sign of the scale is compiled into a kernel. A lazily negated tensor holds the wrong sign.
    """
    addresses = query.data_ptr() | key.data_ptr() | value.data_ptr()
    if mask is not None:
        addresses |= mask.data_ptr()
    if addresses % 16 or query.is_neg() or key.is_neg() or value.is_neg():
        return None
    if mask is None:
        return query.stride(), key.stride(), value.stride(), scale > 0.0
    if mask.is_neg():
        return None
    return query.stride(), key.stride(), value.stride(), scale > 0.0, mask.stride()


_known: dict[Key, Known] = {}


def _bias_key(attn_bias: Bias) -> Key | None:
    """What of a bias the choice depends on, None for those that are looked at every time."""
    if attn_bias is None:
        return ()
    kind = type(attn_bias)
    if kind in _TRIANGLES:
        return (kind,)
    mask = attn_bias.mask if isinstance(attn_bias, KeyPaddingMask) else attn_bias
    if not isinstance(mask, torch.Tensor) or kind not in (KeyPaddingMask, torch.Tensor):
        return None
    if kind is torch.Tensor and (
        mask.dim() != 4 or (mask.requires_grad and torch.is_grad_enabled())
    ):
        return None
    return kind, mask.shape, mask.dtype, mask.device


def plain_key(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, op: object, attn_bias: Bias = None
) -> Key | None:
    """All that the choice for such a call depends on, or None where the long way must be taken."""
    # spelled out: a generator over three takes a microsecond
    if not (
        isinstance(query, torch.Tensor)
        and isinstance(key, torch.Tensor)
        and isinstance(value, torch.Tensor)
    ):
        return None
    if query.dim() != 4 or not (op is None or isinstance(op, str)):
        return None
    if torch.compiler.is_compiling():
        return None
    if torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad
    ):
        return None
    masked = _bias_key(attn_bias)
    if masked is None:
        return None
    device = query.device
    if device.type == "meta" or torch.is_autocast_enabled(device.type):
        return None
    return (
        query.shape,
        key.shape,
        value.shape,
        query.dtype,
        key.dtype,
        value.dtype,
        device,
        key.device,
        value.device,
        op,
        # each looks at the environment, which a program may change; only where it counts
        os.environ.get("SDX_DISABLE") if op is None or op == "auto" else None,
        target.interpreting() if op == "triton" else None,
        *masked,
    )


def recall(key: Key, query: torch.Tensor) -> Known | None:
    """The settled call for this key on this very device, or None."""
    known = _known.get(key)
    # the facts of a device are one object a process; another one means that they were read anew
    if known is None or known.target is not target.of(query.device):
        return None
    return known


def remember(
    key: Key, signature: Signature, impl: Impl, choice: Choice, band: Band | None = None
) -> None:
    """Keep a choice that the long way has made, and the band that the mask's class stands for."""
    if len(_known) >= _MOST:
        _known.clear()
    if not signature.empty:
        scale: float = signature.head_dim**-0.5
        _known[key] = Known(signature, signature.target, scale, impl, choice, band)


def forget(key: Key) -> None:
    """Drop a choice whose launch the driver has refused."""
    _known.pop(key, None)
