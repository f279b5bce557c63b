"""Remembers what a pipeline's `encode_prompt` returned, so that a prompt loads its encoders once.

Knows the method by its arguments and results only; whatever is not plain text and numbers goes past
it to the encoders.
"""

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from sdx_patches.text_kv import adapters_of

if TYPE_CHECKING:
    from sdx_accel.runtime.executor import Executor

__all__ = ["PromptCache"]

# transformers gathers hidden states with hooks that it leaves on the layers; of the patches one
# notes whether a call was compiled
_OWN_HOOKS = ("sdx_accel.", "sdx_patches.", "transformers.")
_PLAIN = (str, int, float, bool, type(None), torch.device, torch.dtype)


class PromptCache:
    """Embeddings of the newest prompts, on the host.

    They are given back as new tensors with the bits, shape, stride, dtype and device of those that
    the encoders returned, so that whoever writes to them spoils nothing.

    Args:
        executor: holds the encoders; adapters that it sees change make everything here outdated.
        maxsize: prompts kept; one of SDXL takes 0.3 MiB, and 0.3 MiB for its negative.

    Attributes:
        hits: calls that ran no encoder.
    """

    def __init__(self, executor: "Executor", maxsize: int = 16) -> None:
        self.executor, self.maxsize = executor, maxsize
        self.hits = 0
        self._kept: OrderedDict[Any, tuple[list[Any], Any, list[Any]]] = OrderedDict()

    def wrap(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """`encode_prompt` of a pipeline's class, as a method that looks here first."""
        signature = inspect.signature(method)

        @functools.wraps(method)
        def encode_prompt(pipe: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                bound = signature.bind(pipe, *args, **kwargs)
            except TypeError:
                return method(pipe, *args, **kwargs)  # says what is wrong with the call
            bound.apply_defaults()
            key = self._key(pipe, list(bound.arguments.values())[1:])
            if key is None:
                return method(pipe, *args, **kwargs)
            if (found := self._kept.get(key)) is not None:
                self.hits += 1
                self._kept.move_to_end(key)
                strength = bound.arguments.get("lora_scale")
                if strength is not None and hasattr(type(pipe), "lora_scale"):
                    # the one thing that the method leaves on the pipeline
                    pipe._lora_scale = strength
                return tree_unflatten([_given(value) for value in found[0]], found[1])
            result = method(pipe, *args, **kwargs)
            leaves, shape = tree_flatten(result)
            if all(isinstance(leaf, (torch.Tensor, *_PLAIN)) for leaf in leaves):
                # with the tokenizers, so that no other gets their identity while this is kept
                self._kept[key] = [_stored(v) for v in leaves], shape, list(_tokenizers(pipe))
                while len(self._kept) > self.maxsize:
                    self._kept.popitem(last=False)
            return result

        return encode_prompt

    def _key(self, pipe: Any, values: list[Any]) -> Any:
        """All that the result depends on; None where that is more than can be compared."""
        arguments = tuple(_plain(value) for value in values)
        if torch.is_grad_enabled() or any(value is NotImplemented for value in arguments):
            return None
        encoders = [m for n, m in self.executor.modules.items() if n.startswith("text_encoder")]
        if any(_is_watched(encoder) for encoder in encoders):
            return None
        states = [_state(encoder) for encoder in encoders]
        if any(None in adapters for *_, adapters in states):
            return None
        kind = self.executor.device.type
        return (
            arguments,
            self.executor.generation,
            tuple(states),
            tuple((id(t), len(t)) for t in _tokenizers(pipe)),
            # zeros for an empty negative prompt, say
            str(dict(pipe.config)),
            torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
        )


def _plain(value: Any) -> Any:
    """The value with its type (`True` is 1 elsewhere), hashable; NotImplemented for all others."""
    if isinstance(value, (list, tuple)):
        inner = tuple(_plain(one) for one in value)
        return NotImplemented if NotImplemented in inner else (type(value), inner)
    return (type(value), value) if isinstance(value, _PLAIN) else NotImplemented


def _is_watched(encoder: torch.nn.Module) -> bool:
    """Whether hooks of others than the plug-in and transformers want to see every call."""
    return any(
        not str(getattr(hook, "__module__", "")).startswith(_OWN_HOOKS)
        for module in encoder.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
        for hook in hooks.values()
    )


def _tokenizers(pipe: Any) -> Iterator[Any]:
    for name, part in pipe.components.items():
        if name.startswith("tokenizer") and part is not None:
            yield part


def _state(encoder: torch.nn.Module) -> tuple[Any, ...]:
    """Changes with the encoder's weights, mode and adapters."""
    versions = tuple(-1 if p.is_inference() else p._version for p in encoder.parameters())
    adapters = tuple(state for m in encoder.modules() if (state := adapters_of(m)) != ())
    return encoder.training, next(encoder.parameters()).dtype, versions, adapters


def _stored(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.device, leaf.detach().to("cpu", copy=True)


def _given(stored: Any) -> Any:
    if not isinstance(stored, tuple):
        return stored
    device, tensor = stored
    return tensor.to(device, copy=True)
