"""Attention as `torch.library` operators: what autograd, torch.compile and CUDA graphs see.

It knows how a call's parts become an operator's arguments and back; it must not choose what runs.
Defined through `Library` and not `custom_op`, whose wrapper costs 20 µs a call where this costs 5
(torch 2.13, CPU).
"""

import contextlib
from dataclasses import dataclass, replace
from typing import Any

import torch

from sdx_kernels.bias import Band, Packed
from sdx_kernels.checks import AttentionInputs, Dropout, settled_inputs
from sdx_kernels.errors import LaunchRefused
from sdx_kernels.ops.attention_bwd_impls import BACKWARD, BackwardInputs
from sdx_kernels.ops.attention_impls import OPERATOR
from sdx_kernels.registry import launches

__all__ = ["backward", "forward", "without_autocast"]

#: what both operators take after their own tensors, in this order
_SHARED = (
    "Tensor? bias, Tensor? key_mask, Tensor? allowed, Tensor? query_starts, Tensor? key_starts, "
    "Tensor? seed, int longest_query, int longest_key, int left, int right, bool has_band, "
    "bool from_end, float p, float scale"
)
_TENSORS = 6

_library = torch.library.Library("sdx_kernels", "DEF")
_library.define(
    f"attention_forward(Tensor query, Tensor key, Tensor value, {_SHARED}, "
    "ScalarType output_dtype, bool with_lse, str implementation, str backward_by) "
    "-> (Tensor, Tensor)"
)
_library.define(
    "attention_backward(Tensor grad, Tensor? lse_grad, Tensor query, Tensor key, Tensor value, "
    f"Tensor out, Tensor lse, {_SHARED}, bool bias_grad, str backward_by) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """Dtypes are settled by then: autocast would round the reference's fp32 products again."""
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


@dataclass(frozen=True, eq=False)
class _Shared:
    """The arguments of `_SHARED`, in its order."""

    bias: torch.Tensor | None
    key_mask: torch.Tensor | None
    allowed: torch.Tensor | None
    query_starts: torch.Tensor | None
    key_starts: torch.Tensor | None
    seed: torch.Tensor | None
    longest_query: int
    longest_key: int
    left: int
    right: int
    has_band: bool
    from_end: bool
    p: float
    scale: float

    @classmethod
    def of(cls, inputs: AttentionInputs) -> "_Shared":
        packed, band, dropout = inputs.packed, inputs.band, inputs.dropout
        return cls(
            inputs.bias,
            inputs.key_mask,
            inputs.allowed,
            None if packed is None else packed.query_starts,
            None if packed is None else packed.key_starts,
            None if dropout is None else dropout.seed,
            0 if packed is None else packed.longest_query,
            0 if packed is None else packed.longest_key,
            -1 if band is None or band.left is None else band.left,
            -1 if band is None or band.right is None else band.right,
            band is not None,
            band is not None and band.from_end,
            inputs.signature.dropout,
            inputs.scale,
        )

    def arguments(self) -> tuple[Any, ...]:
        return tuple(vars(self).values())

    def inputs(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output_dtype: torch.dtype,
        lse: bool,
    ) -> AttentionInputs:
        packed = None
        if self.query_starts is not None and self.key_starts is not None:
            packed = Packed(
                self.query_starts, self.key_starts, self.longest_query, self.longest_key
            )
        band = None
        if self.has_band:
            left, right = (None if end < 0 else end for end in (self.left, self.right))
            band = Band(left, right, self.from_end)
        return settled_inputs(
            query,
            key,
            value,
            self.bias,
            scale=self.scale,
            output_dtype=output_dtype,
            band=band,
            packed=packed,
            key_mask=self.key_mask,
            allowed=self.allowed,
            dropout=None if self.seed is None else Dropout(self.p, self.seed),
            p=self.p,
            lse=lse,
            # an implementation was chosen before the operator was called
            explicit=True,
        )


def _forward_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    *shared, output_dtype, with_lse, implementation, _ = rest
    inputs = _Shared(*shared).inputs(query, key, value, output_dtype, with_lse)
    with without_autocast(query.device.type):
        out, lse = OPERATOR.get(implementation).run(inputs)
    # an operator always returns two tensors
    return out, query.new_empty(0, dtype=torch.float32) if lse is None else lse


def _forward_fake(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    *_, output_dtype, with_lse, _, _ = rest
    batch, queries, heads, _ = query.shape
    accumulate = torch.float64 if query.dtype == torch.float64 else torch.float32
    out = query.new_empty((batch, queries, heads, value.shape[3]), dtype=output_dtype)
    if not with_lse:
        return out, query.new_empty(0, dtype=torch.float32)
    return out, query.new_empty((batch, heads, queries), dtype=accumulate)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    query, key, value, *shared, _, _, _, backward_by = inputs
    out, lse = output
    ctx.save_for_backward(query, key, value, out, lse, *shared[:_TENSORS])
    ctx.shared, ctx.backward_by = shared[_TENSORS:], backward_by
    ctx.set_materialize_grads(False)


def _derive(
    ctx: Any, grad: torch.Tensor | None, lse_grad: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    query, key, value, out, lse, *shared = ctx.saved_tensors
    # the first is a keyset
    wanted = ctx.needs_input_grad[1:]
    if grad is None and lse_grad is None:
        return (None,) * len(wanted)
    gradients = torch.ops.sdx_kernels.attention_backward(
        torch.zeros_like(out) if grad is None else grad,
        lse_grad,
        query,
        key,
        value,
        out,
        lse,
        *shared,
        *ctx.shared,
        wanted[3],
        ctx.backward_by,
    )
    kept = [g if want else None for g, want in zip(gradients, wanted[:4], strict=True)]
    return *kept, *(None for _ in wanted[4:])


class _Derived(torch.autograd.Function):
    """The forward operator below autograd, and the backward operator as its derivative."""

    @staticmethod
    def forward(
        ctx: Any, keyset: torch._C.DispatchKeySet, *arguments: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        result = _below_autograd(keyset, *arguments)
        _setup_context(ctx, arguments, result)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, *_derive(ctx, *grads)


def _below_autograd(
    keyset: torch._C.DispatchKeySet, *arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    operator = torch.ops.sdx_kernels.attention_forward.default
    with torch._C._AutoDispatchBelowAutograd():
        result: tuple[torch.Tensor, torch.Tensor] = operator.redispatch(
            keyset & torch._C._after_autograd_keyset, *arguments
        )
    return result


def _forward_autograd(
    keyset: torch._C.DispatchKeySet, *arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `torch.library.register_autograd` would make, without its look at the schema.

    That asks for every argument's default, of which this operator has none: 350 µs of the 500 that
    a call took on the machine of an H200 (torch 2.11).
    """
    if torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in arguments[:4]
    ):
        derived: tuple[torch.Tensor, torch.Tensor] = _Derived.apply(keyset, *arguments)
        return derived
    return _below_autograd(keyset, *arguments)


def _backward_kernel(
    grad: torch.Tensor,
    lse_grad: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, ...]:
    *shared, bias_grad, backward_by = rest
    named = tuple(name for name in backward_by.split(",") if name)
    forward = _Shared(*shared).inputs(query, key, value, out.dtype, True)
    signature = replace(forward.signature, bias_grad=bias_grad, explicit=bool(named))
    inputs = BackwardInputs(replace(forward, signature=signature), grad, out, lse, lse_grad)
    with without_autocast(query.device.type):
        *three, bias = backward(inputs, named or None)
    return *three, query.new_empty(0) if bias is None else bias


def _backward_fake(
    grad: torch.Tensor,
    lse_grad: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    bias: torch.Tensor | None,
    *rest: Any,
) -> tuple[torch.Tensor, ...]:
    *_, bias_grad, _ = rest
    three = (t.new_empty(t.shape) for t in (query, key, value))
    if bias is None or not bias_grad:
        return *three, query.new_empty(0)
    return *three, bias.new_empty(bias.shape)


def _no_second_derivative(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    raise NotImplementedError("attention has no second derivative here: use op='sdpa-math'")


for _name, _kernel, _fake in (
    ("attention_forward", _forward_kernel, _forward_fake),
    ("attention_backward", _backward_kernel, _backward_fake),
):
    _library.impl(_name, _kernel, "CPU")
    _library.impl(_name, _kernel, "CUDA")
    torch.library.register_fake(f"sdx_kernels::{_name}", _fake, lib=_library)
_library.impl("attention_forward", _forward_autograd, "Autograd", with_keyset=True)
torch.library.register_autograd(
    "sdx_kernels::attention_backward", _no_second_derivative, lib=_library
)


def forward(
    inputs: AttentionInputs, implementation: str, backward_by: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Runs `implementation` as an operator that autograd and torch.compile see through.

    Args:
        inputs: what it supports.
        implementation: a name of `OPERATOR`.
        backward_by: names of `BACKWARD` by falling preference, parted by commas; "" = automatic.

    Returns:
        `[B, Mq, H, Kv]`, and `[B, H, Mq]` where the inputs ask for it.
    """
    with_lse = inputs.signature.lse or inputs.signature.grad
    out, lse = torch.ops.sdx_kernels.attention_forward(
        inputs.query,
        inputs.key,
        inputs.value,
        *_Shared.of(inputs).arguments(),
        inputs.output_dtype,
        with_lse,
        implementation,
        backward_by,
    )
    return out, lse if inputs.signature.lse else None


def backward(inputs: BackwardInputs, only: tuple[str, ...] | None) -> Any:
    """Gradients of query, key, value and bias by the best implementation that the card can launch.

    Raises:
        InvalidInputs: an implementation was named and cannot.
        UnsupportedInputs: nothing fits.
    """
    choice = BACKWARD.require(inputs, only)
    refused: list[str] = []
    while True:
        try:
            gradients = BACKWARD.get(choice.name).run(inputs)
        except LaunchRefused:
            refused.append(choice.name)
            names = only or tuple(i.name for i in BACKWARD.ordered() if i.priority >= 0)
            rest = tuple(name for name in names if name not in refused)
            if not rest:
                raise
            choice = BACKWARD.require(inputs, rest)
        else:
            launches[f"{choice.name}-backward"] += 1
            return gradients
