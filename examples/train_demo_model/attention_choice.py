"""Switch a model to sdx_accel's attention for training, after a check of loss and gradients.

The check: one small batch through copies of the model; the error of ours against stock attention
in fp32 may be at most twice that of stock attention in the training dtype, or 2 %.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from progress import Clock
from torch import Tensor, nn

import sdx_accel  # noqa: F401  (attaches enable_xattn)

__all__ = ["checked_samples", "choose_attention", "finish", "what_ran"]

TOLERANCE = 2e-2

#: loss of a model, given the dtype to compute in
Loss = Callable[[Any, torch.dtype], Tensor]


def checked_samples(device: torch.device) -> int:
    """Samples of the check's batch; on a CPU it has only to be shown to run."""
    return 8 if device.type == "cuda" else 1


def finish(tensor: Tensor) -> None:
    """Wait for the GPU that `tensor` is on, so that a part's seconds are that part's."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def _measure(
    model: nn.Module, loss: Loss, dtype: torch.dtype, clock: Clock, name: str
) -> tuple[float, Tensor]:
    model.zero_grad(set_to_none=True)
    with clock.part(f"{name}, forward"):
        value = loss(model, dtype)
        finish(value)
    with clock.part(f"{name}, backward"):
        value.backward()
        finish(value)
    grads = [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
    return value.item(), torch.cat(grads)


def _error(got: tuple[float, Tensor], exact: tuple[float, Tensor]) -> float:
    """The larger relative error of loss and gradients (L2 over all of them)."""
    loss = abs(got[0] - exact[0]) / max(abs(exact[0]), 1e-12)
    grads = (got[1] - exact[1]).norm() / exact[1].norm().clamp_min(1e-12)
    return max(loss, grads.item())


def choose_attention(
    model: Any, requested: str, loss: Loss, dtype: torch.dtype, clock: Clock
) -> dict[str, Any]:
    """Enable `requested` on `model`, else what picks by itself, else leave it as it is.

    Args:
        model: weights in any dtype; its gradients are not touched.
        requested: "triton", "auto" or "stock".
        loss: of a copy of the model on a fixed small batch.
        dtype: what training computes in.
        clock: told when each part of the check begins and ends.

    Returns:
        What was chosen, and the errors that were measured or raised.
    """
    record: dict[str, Any] = {"requested": requested, "chosen": "stock", "tried": {}}
    if requested == "stock":
        return record
    kind = type(model).__name__
    with clock.part(f"attention check of {kind}"):
        _check(model, requested, loss, dtype, clock, record)
    clock.say(f"attention of {kind}: {record['chosen']}")
    return record


def _check(
    model: Any,
    requested: str,
    loss: Loss,
    dtype: torch.dtype,
    clock: Clock,
    record: dict[str, Any],
) -> None:
    """Fill the record of `choose_attention`."""
    bits = str(dtype).removeprefix("torch.")
    try:
        reference = copy.deepcopy(model).float()
        exact = _measure(reference, loss, torch.float32, clock, "  stock float32")
        rounded = copy.deepcopy(model).to(dtype)
        stock = _error(_measure(rounded, loss, dtype, clock, f"  stock {bits}"), exact)
    except Exception as error:
        record["tried"]["stock"] = f"{type(error).__name__}: {error}"[:500]
        clock.say(f"attention: the check itself failed: {record['tried']['stock']}")
        return
    record["stock_error"] = stock
    for name in dict.fromkeys((requested, "auto")):
        operator = None if name == "auto" else name
        try:
            ours = copy.deepcopy(model).to(dtype)
            ours.enable_xattn(attention_op=operator)
            measured = _measure(ours, loss, dtype, clock, f"  {name} {bits}")
            error_of_ours = _error(measured, exact)
            record["tried"][name] = error_of_ours
            if error_of_ours <= max(2.0 * stock, TOLERANCE):
                model.enable_xattn(attention_op=operator)
                record["chosen"] = name
                break
            clock.say(f"attention {name}: error {error_of_ours:.2e}, stock {stock:.2e}")
        except Exception as error:  # training must not end for this
            record["tried"][name] = f"{type(error).__name__}: {error}"[:500]
            clock.say(f"attention {name}: {record['tried'][name]}")


def what_ran(model: Any) -> dict[str, int]:
    """Attention layers by the implementation that ran last, and all launches so far."""
    import sdx_patches
    from sdx_kernels.registry import launches

    found: dict[str, int] = {}
    for layer in sdx_patches.layers(model):
        found[layer.running] = found.get(layer.running, 0) + 1
    return {**found, **{f"launches of {name}": count for name, count in launches.items()}}
