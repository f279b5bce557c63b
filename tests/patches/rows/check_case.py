"""What is asked of every row: the same pictures as stock, by our op, and nothing left behind."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from torch import Tensor, nn

import sdx_patches
from sdx_kernels.ops import attend
from sdx_kernels.registry import launches
from sdx_patches import Layer

from .parts_case import Row, attentions

#: Largest difference of pictures in 0…1 and of model outputs from stock, fp32 on one machine.
TOLERANCE = 1e-4
#: What a broken op adds; it has to show in the pictures or in what the models return.
SHIFT = 1e-2


@dataclass(frozen=True)
class Measured:
    """One run of a row with our attention.

    Args:
        outputs: the pictures, then what each watched part returned, in order.
        calls: forwards of each attention module, by path, while our op served it.
        ran: calls of our op by implementation.
        layers: the report after the run.
    """

    outputs: list[Tensor]
    calls: Counter[str]
    ran: Counter[str]
    layers: list[Layer]

    @property
    def patched(self) -> list[Layer]:
        return [layer for layer in self.layers if layer.patched]


def tensors(value: Any) -> list[Tensor]:
    """The tensors of a nested output, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    return [t for item in value for t in tensors(item)] if isinstance(value, (tuple, list)) else []


def run(row: Row, root: Any) -> list[Tensor]:
    """The row's pictures, and what its watched parts returned; pictures alone may be clamped."""
    seen: list[Tensor] = []
    hooks = [
        getattr(root, part).register_forward_hook(
            lambda module, args, output: seen.extend(t.detach().clone() for t in tensors(output))
        )
        for part in row.parts
    ]
    try:
        return [row.call(root), *seen]
    finally:
        for hook in hooks:
            hook.remove()


def recorded(row: Row, root: Any) -> list[tuple[str, Any, Any]]:
    """Every call of the row's watched parts: (part, args, kwargs), as the pipeline makes it."""
    calls: list[tuple[str, Any, Any]] = []

    def recording(part: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            calls.append((part, *copied((args, kwargs))))

        return hook

    hooks = [
        getattr(root, part).register_forward_pre_hook(recording(part), with_kwargs=True)
        for part in row.parts
    ]
    try:
        row.call(root)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def copied(value: Any, *place: Any) -> Any:
    """A deep copy of a call's arguments, floating tensors moved to `place` (dtype, device)."""
    if isinstance(value, Tensor):
        return value.detach().clone().to(*place if value.is_floating_point() else place[:1])
    if isinstance(value, dict):
        return {key: copied(item, *place) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(copied(item, *place) for item in value)
    return value


def replay(root: Any, calls: list[tuple[str, Any, Any]], device: str, dtype: Any) -> list[Tensor]:
    """What the parts return for recorded calls, computed in `dtype` on `device`."""
    outputs: list[Tensor] = []
    with torch.no_grad():
        for part, args, kwargs in calls:
            module = getattr(root, part).to(device, dtype)
            args, kwargs = copied((args, kwargs), device, dtype)
            outputs += [t.double().cpu() for t in tensors(module(*args, **kwargs))]
    return outputs


def is_served(module: Any) -> bool:
    """Whether a call of this attention module would go through our op now."""
    if not hasattr(module, "processor"):
        return module.config._attn_implementation == "sdx_accel"
    backend = getattr(module.processor, "_attention_backend", None)
    ours = type(module.processor).__module__.startswith("sdx_patches")
    return ours or str(getattr(backend, "value", backend)).startswith("sdx_accel")


def measure(row: Row, root: Any) -> Measured:
    """Run a patched row and count, from outside, what should have gone through our op."""
    calls: Counter[str] = Counter()

    def counting(path: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            calls[path] += is_served(module)

        return hook

    hooks = [m.register_forward_pre_hook(counting(path)) for path, m in attentions(root)]
    before = launches.copy()
    try:
        outputs = run(row, root)
    finally:
        for hook in hooks:
            hook.remove()
    return Measured(outputs, +calls, launches - before, sdx_patches.layers(root))


def difference(ours: list[Tensor], stock: list[Tensor]) -> float:
    assert [t.shape for t in ours] == [t.shape for t in stock]
    assert all(torch.isfinite(t).all() for t in stock)
    pairs = zip(ours, stock, strict=True)
    # torch's maximum, which a NaN does not get past
    return torch.stack([(a.double() - b.double()).abs().max() for a, b in pairs]).max().item()


def state(root: Any) -> dict[str, Any]:
    """What a patch could leave behind; processors and configurations by identity."""
    parts = {"": root} if isinstance(root, nn.Module) else root.components
    seen: dict[str, Any] = {"active backend": _AttentionBackendRegistry._active_backend}
    for name, part in parts.items():
        for path, module in part.named_modules() if isinstance(part, nn.Module) else ():
            own = vars(module)
            hooks = {key: len(value) for key, value in own.items() if key.endswith("_hooks")}
            processor = getattr(module, "processor", None)
            seen[f"{name}.{path}"] = (
                sorted(own),
                hooks,
                id(own.get("config")),
                getattr(own.get("config"), "_attn_implementation", None),
                id(processor),
                sorted(vars(processor)) if processor is not None else None,
                getattr(processor, "_attention_backend", None),
            )
    return seen


@contextmanager
def broken_op() -> Iterator[None]:
    """Our op adds `SHIFT` to everything it computes, whoever of the patches calls it."""

    def shifted(*args: Any, **kwargs: Any) -> Any:
        out, *rest = attend(*args, **kwargs)
        return (out + SHIFT, *rest)

    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("sdx_patches.") and vars(module).get("attend") is attend:
                patch.setattr(module, "attend", shifted)
        yield
