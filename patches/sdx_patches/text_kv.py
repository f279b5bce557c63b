"""Keys and values of the text, computed once a prompt instead of once a step.

The layers that read the text (`to_k`, `to_v` of cross-attention) are given the very same tensor at
every step, so what they return is the same as well: 650 MiB of SDXL's weights do nothing new after
the first step. Knows attention layers only: nothing of pipelines, plans or devices.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from sdx_patches.compat import ATTENTION, HOOKS, is_a

__all__ = ["TextKV", "adapters_of", "text_projections"]

#: Models whose cross-attention is given the text as the model was given it, or with an image
#: prompt beside it; other `encoder_hid_proj` make a new tensor at each step.
_MODELS: Final = (
    "diffusers.models.unets.unet_2d_condition.UNet2DConditionModel",
    "diffusers.models.controlnets.controlnet.ControlNetModel",
)
_TEXT_AS_GIVEN: Final = (None, "ip_image_proj")


def text_projections(root: nn.Module) -> list[str]:
    """Paths of the layers whose input is the text itself, in order of registration.

    Args:
        root: a UNet or a ControlNet, with weights or on the meta device; adapters may be on.

    Returns:
        `….attn2.to_k` and `….attn2.to_v`, or `….attn2.to_kv` where projections are fused. Empty
        for models that change the text on its way to the layers, and for models with a compiled
        part, whose inner calls nobody sees.
    """
    if not any(is_a(root, name) for name in _MODELS) or _changes_the_text(root):
        return []
    modules = list(root.named_modules())
    if any(_is_compiled(module) for _, module in modules):
        return []
    return [
        f"{path}.{name}"
        for path, module in modules
        if is_a(module, ATTENTION) and _reads_the_text(module)
        for name in _projections(module)
        if _is_plain(getattr(module, name, None))
    ]


def _changes_the_text(model: Any) -> bool:
    if getattr(model, "text_encoder_hid_proj", None) is not None:
        return True
    return (
        getattr(model, "encoder_hid_proj", None) is not None
        and model.config.encoder_hid_dim_type not in _TEXT_AS_GIVEN
    )


def _reads_the_text(attn: Any) -> bool:
    return (
        attn.is_cross_attention
        and attn.norm_cross is None
        and attn.added_kv_proj_dim is None
        and not attn.only_cross_attention
    )


def _projections(attn: Any) -> tuple[str, ...]:
    # the processor decides what is called: the module's own flag stays after unfusing
    return ("to_kv",) if "Fused" in type(attn.processor).__name__ else ("to_k", "to_v")


def _is_plain(layer: Any) -> bool:
    """A layer whose weights are the layer's own, at rest in the dtype that it computes in."""
    return layer is not None and not any(hasattr(part, HOOKS) for part in layer.modules())


def _is_compiled(module: nn.Module) -> bool:
    # what torch.compile returns carries this mark, wrappers that merely watch a call do not
    return hasattr(module._compiled_call_impl, "_torchdynamo_orig_callable")


class TextKV:
    """What some layers return for one text, kept and given back as long as nothing has changed.

    A layer that is asked for anything else (another tensor, another strength of an adapter, with
    gradients) computes with its weights: the result has equal bits either way.

    Args:
        root: the model.
        names: paths of layers in it, as `text_projections` gives them.
        weights: opens a context in which a layer's weights are where it computes.

    Attributes:
        hits: calls that were answered from what is kept.
        misses: calls that computed, those of `fill` aside.
    """

    def __init__(
        self,
        root: nn.Module,
        names: Sequence[str],
        weights: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self.hits = self.misses = 0
        self._layers = {name: _Layer(self, name, root.get_submodule(name)) for name in names}
        self._weights = weights
        self._text: Tensor | None = None
        self._version = 0
        # content of the text: the tensor itself may be written to
        self._copy: Tensor | None = None
        self._refused: Tensor | None = None
        self._key: Any = None
        self._outdated = self._doubted = False

    @property
    def n_bytes(self) -> int:
        """Bytes of what is kept."""
        tensors = [layer.kept for layer in self._layers.values()] + [self._copy]
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    def install(self) -> None:
        """Answer the layers' calls; what compiles or copies a model does not see it."""
        for layer in self._layers.values():
            layer.module.__dict__["_compiled_call_impl"] = layer

    def remove(self) -> None:
        """Forget what is kept and leave the layers as they were."""
        self.drop()
        for layer in self._layers.values():
            if layer.module.__dict__.get("_compiled_call_impl") is layer:
                del layer.module.__dict__["_compiled_call_impl"]

    def drop(self) -> None:
        """Forget what is kept; the layers compute until the next `fill`."""
        self._text = self._copy = self._refused = None
        for layer in self._layers.values():
            layer.kept = None

    def fill(self, text: Tensor, lora_scale: float | None = None) -> bool:
        """Keep what the layers return for `text`, one layer after the other.

        Args:
            text: (batch, tokens, channels), where the layers compute.
            lora_scale: the strength that the model will give its adapters in its own call.

        Returns:
            Whether anything was computed: not for a text of equal content.
        """
        key = (lora_scale, _autocast(text))
        same = text is self._text and _version(text) == self._version and not text.is_inference()
        if same and key == self._key[0] and not self._outdated and not self._doubted:
            return False
        whole = (key, self._state())
        if whole == self._key and not self._outdated and self._is_kept(text):
            self._seat(text)
            self._doubted = False
            return False
        self.drop()
        # normal tensors even under inference mode: only they say when somebody writes to them
        with torch.inference_mode(False), torch.no_grad():
            for name, layer in self._layers.items():
                with self._weights(name), layer.scaled(lora_scale):
                    layer.compute(text)
            self._copy = text.clone(memory_format=torch.preserve_format)
        self._key, self._outdated, self._doubted = whole, False, False
        self._seat(text)
        return True

    def _seat(self, text: Tensor) -> None:
        # the reference keeps the tensor's memory from being used again for another text
        self._text, self._version, self._refused = text, _version(text), None

    def _state(self) -> tuple[Any, ...]:
        return tuple(layer.state() for layer in self._layers.values())

    def _is_kept(self, text: Tensor) -> bool:
        """Whether `text` has content and layout of the one that is kept."""
        kept = self._copy
        return (
            kept is not None
            and (text.shape, text.dtype, text.device) == (kept.shape, kept.dtype, kept.device)
            and text.stride() == kept.stride()
            # matrix kernels are chosen by it
            and text.data_ptr() % 16 == kept.data_ptr() % 16
            and torch.equal(text, kept)
        )

    def answers(self, text: Tensor) -> bool:
        """Whether a layer may answer with what it keeps for `text`."""
        if text is self._text:
            return _version(text) == self._version
        if self._text is None or text is self._refused:
            return False
        if self._is_kept(text):
            self._seat(text)
            return True
        # all layers are given the same tensor: content is compared once
        self._refused = text
        return False

    def doubt(self) -> None:
        """Have the next `fill` look at weights and adapters too, although the text is the same."""
        self._doubted = True

    def outdate(self) -> None:
        """A layer has changed since `fill`: the next one computes again."""
        self._outdated = True

    def weights(self, name: str) -> AbstractContextManager[None]:
        """The context of one layer's weights."""
        return self._weights(name)


class _Layer:
    """Stands where torch looks for a compiled call, which comes before the module's own."""

    def __init__(self, owner: TextKV, name: str, module: Any) -> None:
        self.owner, self.name, self.module = owner, name, module
        self.kept: Tensor | None = None
        self._written = 0
        self._adapters: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and self._may_answer(args[0]):
            self.owner.hits += 1
            return self.kept
        self.owner.misses += 1
        with self.owner.weights(self.name):
            return self.module._call_impl(*args, **kwargs)

    def _may_answer(self, text: Tensor) -> bool:
        module = self.module
        if self.kept is None or torch.is_grad_enabled():
            return False
        # somebody listens to each call
        if module._forward_hooks or module._forward_pre_hooks:
            return False
        if not self.owner.answers(text):
            return False
        if self.kept._version != self._written or adapters_of(module) != self._adapters:
            self.owner.outdate()
            return False
        return True

    def compute(self, text: Tensor) -> None:
        """Keep the output for `text`, unless the adapters' state is not known well enough."""
        self._adapters = adapters_of(self.module)
        if self._adapters is None or (self._adapters and text.dtype == torch.float64):
            return
        if any(_draws(part) for part in self.module.modules()):
            return
        self.kept = self.module._call_impl(text)
        self._written = self.kept._version

    def state(self) -> tuple[Any, ...]:
        """Changes whenever the output may."""
        versions = tuple(_version(weight) for weight in self.module.parameters())
        draws = any(_draws(part) for part in self.module.modules())
        return versions, draws, adapters_of(self.module)

    @contextmanager
    def scaled(self, scale: float | None) -> Iterator[None]:
        """The layer's adapters at another strength; exactly what they were afterwards."""
        before = getattr(self.module, "scaling", None)
        if scale is None or scale == 1.0 or not isinstance(before, dict):
            yield
            return
        before = dict(before)
        self.module.scale_layer(scale)
        try:
            yield
        finally:
            self.module.scaling.update(before)


def _draws(part: nn.Module) -> bool:
    # layers of a LoRA are made in training mode and stay so; most have no dropout
    return part.training and isinstance(part, nn.Dropout) and part.p > 0


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _autocast(tensor: Tensor) -> Any:
    kind = tensor.device.type
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)


def adapters_of(layer: Any) -> Any:
    """Which adapters act in a layer, and how strongly; None for kinds that do not say."""
    active = getattr(layer, "active_adapters", None)
    # whole models have a method of that name
    if active is None or callable(active):
        return ()
    scaling = getattr(layer, "scaling", None)
    if not isinstance(scaling, dict):
        return None
    # a strength is multiplied and divided again at each step, which leaves an error of 1e-16;
    # tensors are multiplied by the nearest fp32
    strengths = tuple((name, ctypes.c_float(scaling[name]).value) for name in sorted(scaling))
    return tuple(active), strengths, tuple(layer.merged_adapters), layer.disable_adapters
