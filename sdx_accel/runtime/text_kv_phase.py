"""Fills the kept keys and values of the text before a denoise, and drops them when they are stale.

Knows when a denoiser is called and with which text; what is kept, and when it may be given back,
is `sdx_patches.text_kv`'s.
"""

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from sdx_accel.runtime.stream_order import order_of
from sdx_patches.text_kv import TextKV

if TYPE_CHECKING:
    from sdx_accel.runtime.executor import Executor

__all__ = ["TextKVPhase"]

_UNET, _PHASE = "unet", "denoise"


class TextKVPhase:
    """Told of each call of a held model before its phase is entered, as `Executor.on_call` has it.

    While the plan says `text_kv`, the weights of the text's projections are on the device for one
    layer at a time and never during a step.

    Args:
        executor: holds the models.

    Attributes:
        kv: what is kept now, or None.
    """

    def __init__(self, executor: "Executor") -> None:
        self.executor = executor
        self.kv: TextKV | None = None
        self._generation = -1
        # weights that gradients may be asked of after the call stay in place until the next one
        self._open = ExitStack()
        self._opened = False

    def __call__(self, name: str, module: Any, args: Any, kwargs: Any) -> None:
        """A model is about to be called with these arguments."""
        executor = self.executor
        if executor.plan is None or not executor.plan.text_kv:
            if self.kv is not None:
                self.close()
            return
        begins = executor.phase != _PHASE
        # with a ControlNet the loop begins with the ControlNet, which is given the same text
        if name != _UNET and not (begins and name.startswith("controlnet")):
            return
        text = _text_of(args, kwargs)
        if text is None or torch.compiler.is_compiling():
            return
        kv = self._current()
        with_gradients = torch.is_grad_enabled()
        if begins or not with_gradients:
            self._release_weights()
        if with_gradients:
            return
        if begins:
            executor.leave(_PHASE)
            kv.doubt()
        if text.device != executor.device:
            text = text.to(executor.device)
        kv.fill(text, (kwargs.get("cross_attention_kwargs") or {}).get("scale"))

    def close(self) -> None:
        """Keep nothing, and leave the layers as they were."""
        self._release_weights()
        if self.kv is not None:
            self.kv.remove()
            self.kv = None

    def _current(self) -> TextKV:
        executor = self.executor
        if self.kv is None or executor.generation != self._generation:
            # adapters put other layers into the place of those that are watched
            self.close()
            unet = executor.modules[_UNET]
            self.kv = TextKV(unet, self._names(), self._weights)
            self.kv.install()
            self._generation = executor.generation
        return self.kv

    def _names(self) -> tuple[str, ...]:
        """The layers whose weights lie apart, as the UNet was planned."""
        return order_of(self.executor.modules[_UNET])[1]

    def _weights(self, name: str) -> AbstractContextManager[None]:
        if torch.is_grad_enabled() and not self._opened:
            self._open.enter_context(self.executor.kv_weights(_UNET, self._names()))
            self._opened = True
        return nullcontext() if self._opened else self.executor.kv_weights(_UNET, [name])

    def _release_weights(self) -> None:
        if self._opened:
            self._open.close()
            self._opened = False


def _text_of(args: Any, kwargs: Any) -> torch.Tensor | None:
    text = kwargs.get("encoder_hidden_states")
    if text is None and len(args) > 2:
        text = args[2]
    if isinstance(text, (tuple, list)):
        text = text[0] if text else None
    return text if isinstance(text, torch.Tensor) else None
