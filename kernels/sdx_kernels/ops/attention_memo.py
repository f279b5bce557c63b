"""Remembers the choice of plain calls, so that a UNet step does not make it 140 times over.

Checking and choosing cost 30 µs and more a call on top of torch's own 10; an SDXL step of 60 ms has
140 calls. What is remembered is a pure function of its key, so bits do not depend on it.
"""

import os
from dataclasses import dataclass

import torch

from sdx_kernels import target
from sdx_kernels.checks import AttentionInputs, Signature
from sdx_kernels.registry import Choice, Impl, launches

__all__ = ["Known", "forget", "plain_key", "recall", "remember"]

#: shapes of one process are few; a program that sweeps sizes must not grow without end
_MOST = 4096

Key = tuple[object, ...]


@dataclass(frozen=True)
class Known:
    """A settled call without bias, dropout, gradient or autocast: run it with new tensors."""

    signature: Signature
    target: target.Target
    scale: float
    impl: Impl
    choice: Choice

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """The output, `[B, Mq, H, Kv]`."""
        factor = self.scale if scale is None else float(scale)
        plain = self.impl.plain
        if plain is not None:
            out = plain(query, key, value, factor)
        else:
            s = self.signature
            shape = (s.batch, s.queries, s.heads, s.value_dim)
            nothing = (None,) * 6
            inputs = AttentionInputs(
                query, key, value, *nothing, factor, s.output_dtype, shape, type(None), s
            )
            out = self.impl.run(inputs)[0]
        launches[self.choice.name] += 1
        return out


_known: dict[Key, Known] = {}


def plain_key(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, op: object
) -> Key | None:
    """All that the choice for such a call depends on, or None where the long way must be taken."""
    if not all(isinstance(tensor, torch.Tensor) for tensor in (query, key, value)):
        return None
    if query.dim() != 4 or not (op is None or isinstance(op, str)):
        return None
    if torch.compiler.is_compiling():
        return None
    if torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad
    ):
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
    )


def recall(key: Key, query: torch.Tensor) -> Known | None:
    """The settled call for this key on this very device, or None."""
    known = _known.get(key)
    # the facts of a device are one object a process; another one means that they were read anew
    if known is None or known.target is not target.of(query.device):
        return None
    return known


def remember(key: Key, signature: Signature, impl: Impl, choice: Choice) -> None:
    """Keep a choice that the long way has made."""
    if len(_known) >= _MOST:
        _known.clear()
    if not signature.empty:
        scale: float = signature.head_dim**-0.5
        _known[key] = Known(signature, signature.target, scale, impl, choice)


def forget(key: Key) -> None:
    """Drop a choice whose launch the driver has refused."""
    _known.pop(key, None)
