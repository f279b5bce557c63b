"""Records what a computation allocates, on the meta device: no weights, no GPU, no arithmetic.

Every operator that yields a tensor on a new storage is an allocation; the storage's end is its
release, exactly when CPython drops the last reference, as in the real run. What the meta device
does not show is added: the workspaces of cuDNN, the copy that a layer norm makes of a strided
input, and attention as a fused kernel.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from sdx_accel.budget.allocator import Event
from sdx_accel.budget.units import MIB

__all__ = ["record"]

_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten._convolution.default)


class _FusedAttention(TorchFunctionMode):
    """Gives attention the memory of a fused kernel: its output, and no scores."""

    def __init__(self, work: Callable[[float], None] | None) -> None:
        super().__init__()
        self._work = work

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            # by position or by name: diffusers' dispatcher, which transformers use, names them
            query, value = (
                args[i] if len(args) > i else kwargs[name]
                for i, name in ((0, "query"), (2, "value"))
            )
            if self._work:
                # two products of N_q × N_k for each head
                keys = value.shape[-2]
                self._work(2.0 * query[..., 0].numel() * keys * (query.shape[-1] + value.shape[-1]))
            return query.new_empty((*query.shape[:-1], value.shape[-1]))
        return func(*args, **kwargs)


class _Recorder(TorchDispatchMode):
    def __init__(self, fixed: set[int], work: Callable[[float], None] | None) -> None:
        super().__init__()
        self._work = work
        self.events: list[Event] = []
        self.curve: list[int] = []
        self._known: dict[int, int] = {}
        self._fixed = fixed
        self._next = 0
        self._live = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        copied = self._begin(_copied_input(func, args))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        self._finish(copied)
        if func in _CONVOLUTIONS and isinstance(out, torch.Tensor):
            self._finish(self._begin(_convolution_workspace(args[0], args[1], out)))
        operations = flop_registry.get(func.overloadpacket) if self._work else None
        if operations is not None and self._work is not None:
            self._work(operations(*args, **(kwargs or {}), out_val=out))
        return out

    def add(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage from now until it ends."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        n_bytes = storage.nbytes()
        if key in self._known or key in self._fixed or not n_bytes:
            return
        identity = self._known[key] = self._next
        self._next += 1
        self._live += n_bytes
        self.events.append((1, identity, n_bytes))
        self.curve.append(self._live)
        weakref.finalize(storage, self._end, key, identity, n_bytes)

    def _end(self, key: int, identity: int, n_bytes: int) -> None:
        if self._known.pop(key, None) is None:
            return
        self._live -= n_bytes
        self.events.append((-1, identity, n_bytes))

    def _begin(self, n_bytes: int) -> Event | None:
        """Count memory that the operator itself takes, until `_finish`."""
        if not n_bytes:
            return None
        event = (1, self._next, n_bytes)
        self._next += 1
        self._live += n_bytes
        self.events.append(event)
        self.curve.append(self._live)
        return event

    def _finish(self, event: Event | None) -> None:
        if event is not None:
            _, identity, n_bytes = event
            self._live -= n_bytes
            self.events.append((-1, identity, n_bytes))


def _copied_input(func: Any, args: tuple[Any, ...]) -> int:
    """Bytes of the copy that torch's CUDA kernel works on, which lies before its output."""
    # of what a projecting convolution gives a transformer, a view with the channels last
    if func is torch.ops.aten.native_layer_norm.default and not args[0].is_contiguous():
        return _bytes_of(args[0])
    return 0


def _bytes_of(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


#: the most that cuDNN took beside channels-last tensors of SDXL's decoder on an H200, in fp16, bf16
#: and fp32: nothing in most, 15 MiB in two of eleven
_NHWC_WORKSPACE = 16 * MIB
#: how many sums in fp32 cuDNN adds up for each number of an output of few positions, so that all
#: of the card has work: 3.75 MiB for the 2 × 1280 × 8 × 8 of SD 1.5 from 1280 and from 2560
#: channels (H200, fp16, torch 2.11); none at stride 2, and none where there were 512 positions
_PARTIAL_SUMS, _FEW_POSITIONS = 6, 128


def _convolution_workspace(source: torch.Tensor, kernel: torch.Tensor, out: torch.Tensor) -> int:
    """Bytes cuDNN takes for one convolution.

    Its tensor-core kernels want NHWC. Of NCHW tensors it keeps a transposed copy of input, filter
    and output: the difference between live tensors and torch's measured peak in an SDXL VAE decode,
    0.58 of the tensors from 512² to 2048² on an H200, and the segments held after a UNet step.
    """
    copies, read = _bytes_of(source, kernel, out), _bytes_of(source)
    if source.dim() == 4 and source.stride(1) == 1 and source.shape[1] > 1:
        # rows of several pictures do not follow each other: torch copies them
        whole = source.is_contiguous(memory_format=torch.channels_last)
        weights = kernel.is_contiguous(memory_format=torch.channels_last)
        made = (0 if whole else read) + (0 if weights else _bytes_of(kernel))
        return min(_NHWC_WORKSPACE, copies) + made
    return copies + _partial_sums(source, kernel, out)


def _partial_sums(source: torch.Tensor, kernel: torch.Tensor, out: torch.Tensor) -> int:
    if out.dim() != 4 or out.element_size() != 2 or kernel.shape[2:].numel() == 1:
        return 0
    few = out.numel() // out.shape[1] <= _FEW_POSITIONS
    # a stride leaves fewer positions than it was given
    return _PARTIAL_SUMS * 4 * out.numel() if few and out.shape[2:] == source.shape[2:] else 0


def record(
    call: Callable[[], Any],
    *,
    fixed: list[torch.Tensor],
    inputs: list[torch.Tensor],
    repeat: int = 1,
    samples: int = 64,
    work: Callable[[float], None] | None = None,
) -> tuple[tuple[Event, ...], tuple[float, ...]]:
    """Run `call` on the meta device and return its allocator events.

    Args:
        call: the computation; its modules and inputs live on the meta device.
        fixed: tensors that are accounted for elsewhere (weights, buffers).
        inputs: tensors that live through the call and count.
        repeat: how often the call runs; two shows what the second step of a loop finds cached.
        samples: length of the curve.
        work: told the floating-point operations of each product and convolution as it runs.

    Returns:
        Events for `sdx_accel.budget.allocator`, and live bytes over the call in MiB.
    """
    recorder = _Recorder({tensor.untyped_storage()._cdata for tensor in fixed}, work)
    for tensor in inputs:
        recorder.add(tensor)
    with torch.no_grad(), _FusedAttention(work), recorder:
        for _ in range(repeat):
            out = call()
            del out
    events = tuple(recorder.events)
    curve = recorder.curve[: len(recorder.curve) // repeat] or [0]
    step = max(1, len(curve) // samples)
    sampled = tuple(round(max(curve[i : i + step]) / MIB, 2) for i in range(0, len(curve), step))
    return events, sampled
