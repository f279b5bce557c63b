"""Fills the kept keys and values of the text before a denoise, and drops them when they are stale.

Knows when a UNet or a ControlNet is called and with which text; what is kept, and when it may be
given back, is `sdx_patches.text_kv`'s.
"""

from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from sdx_accel.runtime.stream_order import order_of
from sdx_patches.text_kv import TextKV

if TYPE_CHECKING:
    from sdx_accel.runtime.executor import Executor

__all__ = ["TextKVPhase"]

_PHASE = "denoise"


class TextKVPhase:
    """Told of each call of a held model before its phase is entered, as `Executor.on_call` has it.

    While the plan says `text_kv`, the weights of the text's projections are on the device for one
    layer at a time and never during a step.

    Args:
        executor: holds the models.

    Attributes:
        kept: what is kept now, by model.
    """

    def __init__(self, executor: "Executor") -> None:
        self.executor = executor
        self.kept: dict[str, TextKV] = {}
        # what `kept` was made for: the weights' generation, and each model's layers that lie apart
        self._made_for: Any = None
        # weights that gradients may be asked of after the call stay in place until the next one
        self._open: dict[str, ExitStack] = {}

    @property
    def kv(self) -> TextKV | None:
        """What is kept for the UNet, or None."""
        return self.kept.get("unet")

    def __call__(self, name: str, module: Any, args: Any, kwargs: Any) -> None:
        """A model is about to be called with these arguments."""
        executor = self.executor
        if executor.plan is None or not executor.plan.text_kv:
            if self.kept:
                self.close()
            return
        if name not in self._readers():
            return
        begins = executor.phase != _PHASE
        text = _text_of(args, kwargs)
        if text is None or torch.compiler.is_compiling():
            return
        kept = self._current()
        with_gradients = torch.is_grad_enabled()
        if begins or not with_gradients:
            self._release_weights(None if begins else name)
        if with_gradients:
            return
        if begins:
            executor.leave(_PHASE)
            for kv in kept.values():
                kv.doubt()
        if text.device != executor.device:
            text = text.to(executor.device)
        scale = (kwargs.get("cross_attention_kwargs") or {}).get("scale")
        if name in kept:
            kept[name].fill(text, scale)
        if begins:
            # the loop has begun with one of several models, which are given the same text: this is
            # the time to compute it for the others, while no model is in
            for other, kv in kept.items():
                if other != name:
                    kv.fill(text, scale)

    def close(self) -> None:
        """Keep nothing, and leave the layers as they were."""
        self._release_weights()
        for kv in self.kept.values():
            kv.remove()
        self.kept, self._made_for = {}, None

    def _readers(self) -> dict[str, tuple[str, ...]]:
        """By model of the loop, the layers whose weights lie apart, as it was planned."""
        return {
            name: order_of(module)[1]
            for name, module in self.executor.modules.items()
            if name == "unet" or name.startswith("controlnet")
        }

    def _current(self) -> dict[str, TextKV]:
        executor, readers = self.executor, self._readers()
        made_for = executor.generation, readers
        if made_for != self._made_for:
            # adapters put other layers into the place of those that are watched
            self.close()
            for name, layers in readers.items():
                if layers:
                    kv = TextKV(executor.modules[name], layers, partial(self._weights, name))
                    kv.install()
                    self.kept[name] = kv
            self._made_for = made_for
        return self.kept

    def _weights(self, model: str, layer: str) -> AbstractContextManager[None]:
        if torch.is_grad_enabled() and model not in self._open:
            stack = self._open[model] = ExitStack()
            layers = order_of(self.executor.modules[model])[1]
            stack.enter_context(self.executor.kv_weights(model, layers))
        return nullcontext() if model in self._open else self.executor.kv_weights(model, [layer])

    def _release_weights(self, model: str | None = None) -> None:
        """Out with what was left in for gradients, of one model or of all."""
        for name in [model] if model is not None else list(self._open):
            if name in self._open:
                self._open.pop(name).close()


def _text_of(args: Any, kwargs: Any) -> torch.Tensor | None:
    text = kwargs.get("encoder_hidden_states")
    if text is None and len(args) > 2:
        text = args[2]
    if isinstance(text, (tuple, list)):
        text = text[0] if text else None
    return text if isinstance(text, torch.Tensor) else None
