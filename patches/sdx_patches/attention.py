"""Attention processors for diffusers' `Attention` modules of UNets, ControlNets and VAEs.

They know one module's documented parts and the attention op; they must not know which model they
sit in. Settings and records live on the module, never on the processor: diffusers re-creates a
processor from its class alone when it loads or unloads an IP-Adapter.
"""

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from sdx_kernels.errors import InvalidInputs
from sdx_kernels.ops import attend
from sdx_kernels.registry import Choice
from sdx_patches import compat, torch_call
from sdx_patches.session import (
    PatchSession,
    Site,
    is_patched,
    record,
    settings_of,
    site_of,
)

__all__ = [
    "SdxAttnProcessor",
    "Segment",
    "SharesWeights",
    "adopt",
    "attend_heads",
    "attend_segments",
    "attention_bias",
    "call_stock",
    "finish",
    "install",
    "introduce",
    "split_heads",
    "stand_in",
    "stock_of",
    "stored_signature",
    "tokens_of",
    "uninstall",
]

Call = TypeVar("Call", bound=Callable[..., Any])


def stored_signature(call: Call) -> Call:
    """`call` with its signature stored on it.

    diffusers asks for the signature at each of the 140 calls of an SDXL step, to drop the
    arguments that are not named in it; a stored one saves 15 µs of 25.
    """
    call.__signature__ = inspect.signature(call)  # type: ignore[attr-defined]
    return call


class SdxAttnProcessor:
    """Self- and cross-attention with separate `to_q`, `to_k`, `to_v`, by our attention op.

    The base of all our processors. Each of diffusers' classes has one of its own: what a class
    leaves out, ours leaves out in its place, and an instance that diffusers creates from the class
    alone still knows what it stands in for.

    Attributes:
        host: name of diffusers' class in the place of which instances stand.
        scaled: whether that class multiplies the scores by `attn.scale`, and not by 1/√dim.
        normed: whether that class calls `attn.norm_q` and `attn.norm_k`.
        spatial: whether that class calls `attn.spatial_norm`.
        stock: the host's processor that this one stands in for; None where diffusers created
            this instance itself.
    """

    host: ClassVar[str] = ""
    scaled: ClassVar[bool] = False
    normed: ClassVar[bool] = True
    spatial: ClassVar[bool] = True

    def __init__(self) -> None:
        self.stock: Any = None

    def project(
        self, attn: Any, hidden_states: Tensor, context: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, each (batch, length, heads, dim)."""
        source = hidden_states if context is None else context
        return (
            split_heads(attn.to_q(hidden_states), attn.heads),
            split_heads(attn.to_k(source), attn.heads),
            split_heads(attn.to_v(source), attn.heads),
        )

    @stored_signature
    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
        scale: float | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """One attention layer, projections, residual and rescaling included.

        Args:
            attn: the `Attention` module that owns the weights.
            hidden_states: (batch, length, channels) or (batch, channels, height, width).
            encoder_hidden_states: (batch, keys, channels) for cross-attention, else None.
            attention_mask: additive float or bool (True = attend), of shape (batch, keys),
                (batch or batch·heads, 1 or length, keys) or (batch, 1 or heads, …, keys).
            temb: what `attn.spatial_norm` is conditioned on, where the module has one.
            scale: ignored, as in diffusers' own processors (LoRA scales go through PEFT).
            **kwargs: ignored; diffusers passes only arguments that are named here.

        Returns:
            A tensor of `hidden_states`' shape.

        Raises:
            InvalidInputs: the mask's length is not the number of keys.
        """
        if not is_patched(attn) and (stock := stock_of(self)) is not None:
            return call_stock(
                stock,
                attn,
                hidden_states,
                encoder_hidden_states=encoder_hidden_states,
                attention_mask=attention_mask,
                temb=temb,
            )
        query, key, value = self.prepare(attn, hidden_states, encoder_hidden_states, temb)
        bias = attention_bias(attention_mask, query.shape[0], attn.heads, key.shape[1])
        out, choice = attend_heads(attn, query, key, value, bias, self.scale_of(attn))
        record(attn, choice)
        return finish(attn, out, hidden_states)

    def scale_of(self, attn: Any) -> float | None:
        """Factor of the scores, as the host's class has it; None = 1/√dim."""
        return attn.scale if self.scaled else None

    def prepare(
        self, attn: Any, hidden_states: Tensor, context: Tensor | None, temb: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value with every norm applied that the host's class applies."""
        if self.spatial and attn.spatial_norm is not None:
            hidden_states = attn.spatial_norm(hidden_states, temb)
        hidden_states = tokens_of(attn, hidden_states)
        if context is not None and attn.norm_cross is not None:
            context = attn.norm_encoder_hidden_states(context)
        query, key, value = self.project(attn, hidden_states, context)
        if self.normed and attn.norm_q is not None:
            query = attn.norm_q(query)
        if self.normed and attn.norm_k is not None:
            key = attn.norm_k(key)
        return query, key, value


def stock_of(ours: SdxAttnProcessor) -> Any:
    """The host's processor that `ours` stands in for, made now where the host made `ours`.

    Returns:
        None where one cannot be made without arguments, or while a graph is being traced.
    """
    if ours.stock is None and not torch.compiler.is_compiling():
        try:
            ours.stock = getattr(importlib.import_module(compat.PROCESSORS), ours.host)()
        # it wants arguments, or this diffusers has none
        except (TypeError, AttributeError):
            return None
    return ours.stock


def call_stock(stock: Any, attn: Any, hidden_states: Tensor, **arguments: Any) -> Any:
    """What the host's processor makes of a call to ours, on a module that is not patched.

    Ours comes to stand there when somebody puts back what he kept: a pipeline with perturbed
    attention at the end of its call, say, in the middle of which ours was switched off.
    """
    named = inspect.signature(stock.__call__).parameters
    return stock(attn, hidden_states, **{k: v for k, v in arguments.items() if k in named})


def split_heads(tensor: Tensor, heads: int) -> Tensor:
    """(batch, length, heads·dim) as a (batch, length, heads, dim) view."""
    # view and not unflatten, which is Python: 2 µs a call, three calls a layer
    return tensor.view(tensor.shape[0], tensor.shape[1], heads, -1)


def tokens_of(attn: Any, hidden_states: Tensor) -> Tensor:
    """The layer's input as normalised tokens, (batch, length, channels).

    Args:
        attn: the module, with its `group_norm`, which may be None.
        hidden_states: (batch, length, channels) or (batch, channels, height, width).
    """
    if hidden_states.dim() == 4:
        hidden_states = hidden_states.flatten(2).transpose(1, 2)
    if attn.group_norm is not None:
        hidden_states = attn.group_norm(hidden_states.transpose(1, 2)).transpose(1, 2)
    return hidden_states


def attend_heads(
    attn: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scale: float | None = None,
) -> tuple[Tensor, Choice]:
    """Attention of one module's heads, with its wish for fp32.

    Args:
        attn: the module.
        query, key, value: (batch, length, heads, dim).
        bias: broadcasts to (batch, heads, queries, keys); float or bool.
        scale: factor of the scores; None = 1/√dim.

    Returns:
        (batch, queries, heads·dim) in the query's dtype, and what ran.
    """
    dtype = query.dtype
    if attn.upcast_attention:
        # upcast_softmax needs nothing: every implementation keeps its scores and softmax in
        # fp32, so only the request for fp32 products costs anything
        query, key, value = query.float(), key.float(), value.float()
    settings = settings_of(attn)
    heard_by = torch_call.listener()
    if heard_by is None:
        out, choice = attend(query, key, value, bias, 0.0, scale, op=settings.attention_op)
    else:
        out, choice = torch_call.attend_listened(
            heard_by, query, key, value, bias, 0.0, scale, requested=settings.requested
        )
    return out.to(dtype).flatten(2), choice


class Segment(NamedTuple):
    """A part of a layer's keys, and what is added to the scores of its keys.

    Attributes:
        key: (batch, length, heads, dim).
        value: (batch, length, heads, dim).
        bias: broadcasts to (batch, heads, queries, length); None adds nothing.
    """

    key: Tensor
    value: Tensor
    bias: Tensor | None = None


def attend_segments(
    attn: Any, query: Tensor, segments: Sequence[Segment], scale: float | None
) -> tuple[Tensor, Choice]:
    """Attention over several segments of keys as if they were one sequence.

    Returns:
        (batch, queries, heads·dim) in the query's dtype, and what ran.
    """
    # The one place where segments are joined. `merge_attentions` of one partial attention a
    # segment gives the same, but not for less: where the output has n bytes in 16 bits, joining
    # keys and values moves 4 n bytes, the merge of two parts in fp32 about 23 n.
    if len(segments) == 1:
        return attend_heads(attn, query, *segments[0], scale)
    key = torch.cat([segment.key for segment in segments], dim=1)
    value = torch.cat([segment.value for segment in segments], dim=1)
    return attend_heads(attn, query, key, value, _joined_bias(segments), scale)


def _joined_bias(segments: Sequence[Segment]) -> Tensor | None:
    like = next((segment.bias for segment in segments if segment.bias is not None), None)
    if like is None:
        return None
    # True where the mask is boolean, 0 where it is added
    nothing = like.new_ones(()) if like.dtype == torch.bool else like.new_zeros(())
    parts = [
        nothing.expand(*like.shape[:-1], segment.key.shape[1])
        if segment.bias is None
        else segment.bias
        for segment in segments
    ]
    return torch.cat(parts, dim=-1)


def finish(attn: Any, out: Tensor, residual: Tensor) -> Tensor:
    """The output projection, back to a picture where the input was one, residual and rescaling.

    Args:
        attn: the module.
        out: (batch, length, heads·dim).
        residual: the layer's input.
    """
    for layer in attn.to_out:
        out = layer(out)
    if residual.dim() == 4:
        out = out.transpose(1, 2).reshape(residual.shape)
    if attn.residual_connection:
        out = out + residual
    if attn.rescale_output_factor != 1.0:
        out = out / attn.rescale_output_factor
    return out


def attention_bias(mask: Tensor | None, batch: int, heads: int, keys: int) -> Tensor | None:
    """A diffusers attention mask as a bias that broadcasts to (batch, heads, queries, keys).

    Nothing is repeated or padded: heads and queries of size 1 are broadcast by the op.

    Raises:
        InvalidInputs: the mask covers another number of keys, or its first size fits neither
            the batch nor the batch times the heads.
    """
    if mask is None:
        return None
    if mask.shape[-1] != keys:
        raise InvalidInputs(
            f"the attention mask covers {mask.shape[-1]} positions but there are {keys} keys; "
            "pass a mask of the same length as the text (or other context) that it belongs to"
        )
    if mask.dim() == 2:
        mask = mask[:, None, :]
    if mask.dim() == 4:
        return mask
    if mask.dim() == 3 and mask.shape[0] in (1, batch):
        return mask[:, None]
    if mask.dim() == 3 and mask.shape[0] == batch * heads:
        return mask.unflatten(0, (batch, heads))
    raise InvalidInputs(
        f"the attention mask has shape {tuple(mask.shape)}; with a batch of {batch} and {heads} "
        f"heads its first size must be {batch} or {batch * heads}"
    )


class SharesWeights(SdxAttnProcessor):
    """A stand-in for a processor that is a module: it holds the same weights, not copies.

    Whatever the host's processor holds (submodules, hooks, its list of scales) both hold, so
    `parameters()`, `state_dict()` and loaders see what they saw before. No `stored_signature`
    here: on a module, torch.compile(fullgraph=True) fails on it.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "stock":
            super().__setattr__(name, value)
            return
        # past torch's own __setattr__, which would register it as a submodule and so list every
        # weight twice
        vars(self)["stock"] = value
        if value is not None:
            vars(self).update(vars(value))

    def hand_back(self) -> None:
        """Write to the host's processor what was assigned to this one meanwhile."""
        vars(self.stock).update({k: v for k, v in vars(self).items() if k != "stock"})


def install(attn: Any, session: PatchSession, processor: type[SdxAttnProcessor] | None) -> None:
    """Claim `attn` for the session and put a `processor` in the place of the host's.

    Args:
        attn: a diffusers `Attention`.
        session: the running session; its failure puts the host's processor back.
        processor: the class that stands in for the one that is there; None where the one that
            is there is ours already.
    """
    current = attn.processor
    site = session.claim(attn)
    if not any(isinstance(undo, RestoreProcessor) for undo in site.undo):
        site.undo.append(RestoreProcessor(attn))
    session.on_failure(partial(_put, attn, current))
    if processor is not None:
        stand_in(attn, site, processor)
    else:
        introduce(type(attn.processor))
        adopt(attn.processor, site)


def stand_in(attn: Any, site: Site, processor: type[SdxAttnProcessor]) -> None:
    """Replace the host's processor of a claimed module, remembering it for the way back."""
    introduce(processor)
    ours = processor()
    ours.stock = site.stock = attn.processor
    _put(attn, ours)


def adopt(ours: SdxAttnProcessor, site: Site) -> None:
    """Keep in mind what a processor of ours stands in for, however it came to a claimed module.

    Without us the host, which made it from its class, would have made a new one of the stock
    class: so do we. One that cannot be made without arguments stays the one that was there.
    """
    stock = stock_of(ours)
    if stock is None:
        ours.stock = site.stock
    else:
        site.stock = stock


def introduce(processor: type[SdxAttnProcessor]) -> None:
    """Have diffusers' hooks treat ours as the class that it stands in for; it stays so."""
    try:
        from diffusers.hooks._helpers import AttentionProcessorRegistry as Known

        stock = getattr(importlib.import_module(compat.PROCESSORS), processor.host)
        Known.register(processor, Known.get(stock))
    # a diffusers without such hooks, or whose hooks do not know the stock class either
    except (ImportError, AttributeError, TypeError, ValueError):
        return


def uninstall(attn: Any) -> None:
    """Put the host's own processor back where ours is; leave any other that came later."""
    ours = attn.processor
    if not isinstance(ours, SdxAttnProcessor):
        return
    site = site_of(attn)
    stock = stock_of(ours)
    if stock is None and site is not None:
        stock = site.stock
    if stock is None:
        return
    if isinstance(ours, SharesWeights) and ours.stock is stock:
        ours.hand_back()
    _put(attn, stock)


def _put(attn: Any, processor: Any) -> None:
    if attn.processor is processor:
        return
    # torch lets nothing but a module take a module's place
    if not isinstance(processor, nn.Module):
        attn._modules.pop("processor", None)
    attn.processor = processor


@dataclass
class RestoreProcessor:
    """Undo entry of one module; a class, so that a patched model can be pickled and copied."""

    attn: Any

    def __call__(self) -> None:
        uninstall(self.attn)
