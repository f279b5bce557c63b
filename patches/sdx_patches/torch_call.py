"""Torch's own attention call, in the place of ours where somebody listens to it.

Knows torch's function modes: diffusers' layer skipping, and whoever watches or replaces calls of
`scaled_dot_product_attention`, sees torch's functions only. Knows no host class.
"""

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import BaseTorchFunctionMode
from torch.utils._device import DeviceContext

from sdx_kernels.bias import AttentionBias, LowerTriangularMask
from sdx_kernels.registry import Choice

__all__ = ["NAME", "attend_listened", "listener"]

#: What a report says runs there.
NAME: Final = "torch's scaled_dot_product_attention"

#: Modes that look at no attention: `set_default_device`, and torch's mode that does nothing.
_DEAF: Final = (DeviceContext, BaseTorchFunctionMode)


def listener() -> str | None:
    """Name of a mode that may listen to torch's attention now, or None; 30 ns where none is on."""
    for index in range(torch._C._len_torch_function_stack()):
        kind = type(torch._C._get_function_stack_at(index))
        if kind not in _DEAF:
            return kind.__name__
    return None


def attend_listened(
    heard_by: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | AttentionBias | None,
    p: float,
    scale: float | None,
    *,
    requested: str,
) -> tuple[Tensor, Choice]:
    """Attention by torch's own function, as diffusers' and transformers' own code call it.

    Args:
        heard_by: what `listener` returned.
        query, key, value: (batch, length, heads, dim).
        bias: float or bool, broadcast to (batch, heads, queries, keys); or a class of biases.
        p: dropout probability.
        scale: factor of the scores; None = 1/√dim.
        requested: name of the op that was asked for, for the report.

    Returns:
        (batch, queries, heads, value dim) and what ran, with the reason.
    """
    causal = type(bias) is LowerTriangularMask
    if isinstance(bias, AttentionBias):
        shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
        bias = None if causal else bias.materialize(shape, query.dtype, query.device)
    if bias is not None and bias.dtype != torch.bool:
        bias = bias.to(query.dtype)
    out = functional.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=bias,
        dropout_p=p,
        is_causal=causal,
        scale=scale,
    )
    reason = f"{heard_by} is on, which can hear and change torch's own calls only"
    return out.transpose(1, 2), Choice(NAME, {requested: (reason,)})
