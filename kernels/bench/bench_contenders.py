"""Who takes part in the attention benchmark: torch's kernels, ours as shipped, ours to be tried.

A contender turns inputs into a step to be timed. It knows the launchers and must not time anything
or judge results. Run by itself it prints who would take part.
"""

import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sdx_kernels import LowerTriangularMask, attend

Shape = tuple[str, int, int, int, int, int, bool]
#: compute capability of the card whose ladders take part; None = none of our launchers does
Card = tuple[int, int] | None
Step = Callable[[], Any]
Start = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], Step]

#: through the operator, as a user calls it
IMPLEMENTATIONS = ("automatic", "triton", "sdpa", "sdpa-flash", "sdpa-efficient", "sdpa-cudnn")
PEERS = {
    "torch-flash": SDPBackend.FLASH_ATTENTION,
    "torch-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "torch-cudnn": SDPBackend.CUDNN_ATTENTION,
}


@dataclass(frozen=True)
class Contender:
    """One way to compute attention.

    Attributes:
        name: what the table prints; the family comes first in names of ours.
        kind: "peer", "shipped" (what dispatch would launch) or "tune" (a candidate).
        start: query, key, value and (backward) the output's gradient to the step that is timed; it
            returns the output, or (dq, dk, dv).
        redo: the share of query tiles that the optimistic softmax gives up on these inputs.
        private: it writes to its inputs, and so gets copies.
    """

    name: str
    kind: str
    start: Start
    redo: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], float] | None = None
    private: bool = False


def _operator(name: str, causal: bool) -> Contender:
    bias = LowerTriangularMask() if causal else None
    op = None if name == "automatic" else name

    def start(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: torch.Tensor | None) -> Step:
        return lambda: attend(q, k, v, bias, op=op)[0]

    return Contender(name, "peer" if name.startswith("sdpa") else "shipped", start)


def _ours(
    module: str, function: str, name: str, kind: str, ladder: Any, **extra: object
) -> Contender:
    """A forward launcher with a ladder of its own, shipped or of one candidate."""
    launch = getattr(importlib.import_module(f"sdx_kernels._triton.{module}"), function)
    positional = () if module == "attention_tma" else (None,)

    def start(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: torch.Tensor | None) -> Step:
        return lambda: launch(
            q,
            k,
            v,
            *positional,
            scale=q.shape[-1] ** -0.5,
            output_dtype=q.dtype,
            with_lse=False,
            ladder=ladder,
            **extra,
        )[0]

    return Contender(name, kind, start)


def _tma(name: str, kind: str, ladder: Any) -> Contender:
    plain = _ours("attention_tma", "launch_attention_tma", name, kind, ladder)
    if not ladder[0].optimistic:
        return plain

    def redo(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
        tiles = q.shape[0] * q.shape[2] * -(-q.shape[1] // ladder[0].block_m)
        redone = torch.zeros(tiles, dtype=torch.int32, device=q.device)
        counted = _ours(
            "attention_tma", "launch_attention_tma", name, kind, ladder[:1], redone=redone
        )
        counted.start(q, k, v, None)()
        return redone.float().mean().item()

    return Contender(name, kind, plain.start, redo)


def _torch_backward(backend: SDPBackend) -> Start:
    def start(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor | None) -> Step:
        leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        with torch.enable_grad(), sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(*(leaf.transpose(1, 2) for leaf in leaves))
            out = out.transpose(1, 2)
        return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)

    return start


def _our_backward(forward: Callable[..., Any], backward: Callable[..., Any], ladder: Any) -> Start:
    def start(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor | None) -> Step:
        scale = q.shape[-1] ** -0.5
        out, lse = forward(q, k, v, None, scale=scale, output_dtype=q.dtype, with_lse=True)
        return lambda: backward(grad, q, k, v, out, lse, None, scale=scale, ladder=ladder)[:3]

    return start


def _sage(missing: list[str]) -> Iterator[Contender]:
    try:
        sageattn: Any = importlib.import_module("sageattention").sageattn
    except (ImportError, OSError, RuntimeError) as error:
        missing.append(f"sageattention: {error}")
        return

    def start(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: torch.Tensor | None) -> Step:
        return lambda: sageattn(q, k, v, tensor_layout="NHD", is_causal=False)

    # it subtracts the mean of k in place
    yield Contender("sage", "peer", start, private=True)


def _portable(shape: Shape, dtype: torch.dtype, card: tuple[int, int]) -> Iterator[Contender]:
    tuning = importlib.import_module("sdx_kernels.tuning.attention")
    _, _, _, keys, _, dim, _ = shape
    ladder = tuning.ladder_for(card, dim, dim, dtype, keys)
    if not ladder:
        return
    yield _ours("attention_fwd", "launch_attention_fwd", "portable", "shipped", ladder)
    for name, config in getattr(tuning, "candidates", lambda *_: {})(
        card, dim, dim, dtype, keys
    ).items():
        yield _ours("attention_fwd", "launch_attention_fwd", name, "tune", (config,))


def _short(shape: Shape, dtype: torch.dtype, card: tuple[int, int]) -> Iterator[Contender]:
    tuning = importlib.import_module("sdx_kernels.tuning.attention_short")
    _, _, queries, keys, _, dim, _ = shape
    ladder = tuning.ladder_for_short(card, dim, dim, dtype, keys, queries=queries)
    module = ("attention_short", "launch_attention_short")
    if ladder:
        yield _ours(*module, "short", "shipped", ladder)
    for name, config in tuning.candidates(card, dim, dim, dtype, keys).items():
        yield _ours(*module, name, "tune", (config,))


def _tma_all(shape: Shape, dtype: torch.dtype, card: tuple[int, int]) -> Iterator[Contender]:
    tuning = importlib.import_module("sdx_kernels.tuning.attention_tma")
    _, _, _, keys, _, dim, _ = shape
    ladder = tuning.ladder_for_tma(card, dim, dim, dtype, keys)
    if ladder:
        yield _tma("tma", "shipped", ladder)
    for name, config in tuning.candidates(card, dim, dim, dtype, keys).items():
        yield _tma(name, "tune", (config,))


def _wide_kind(dim: int, dtype: torch.dtype, with_lse: bool) -> Any:
    tuning = importlib.import_module("sdx_kernels.tuning.attention_wide")
    return tuning.WideKind(dim, dim, dtype, with_lse=with_lse)


def _wide(shape: Shape, dtype: torch.dtype, card: tuple[int, int]) -> Iterator[Contender]:
    if shape[5] <= 128:
        return
    tuning = importlib.import_module("sdx_kernels.tuning.attention_wide")
    kind = _wide_kind(shape[5], dtype, False)
    module = ("attention_wide_launch", "launch_attention_wide_fwd")
    ladder = tuning.wide_ladder_for(card, kind)
    if ladder:
        yield _ours(*module, "wide", "shipped", ladder)
    for name, config in tuning.candidates(card, kind).items():
        yield _ours(*module, f"wide-{name}", "tune", (config,))


def _fused_backward(shape: Shape, dtype: torch.dtype, card: tuple[int, int]) -> Iterator[Contender]:
    launch = importlib.import_module("sdx_kernels._triton.attention_bwd_launch")
    forward = importlib.import_module("sdx_kernels._triton.attention_fwd").launch_attention_fwd
    tuning = importlib.import_module("sdx_kernels.tuning.attention_bwd")
    fwd = importlib.import_module("sdx_kernels.tuning.attention")
    _, _, _, keys, _, dim, _ = shape
    ladder = tuning.backward_ladder_for(card, dim, dim, dtype)
    first = functools.partial(forward, ladder=fwd.ladder_for(card, dim, dim, dtype, keys))
    if ladder is not None:
        start = _our_backward(first, launch.launch_attention_bwd, ladder)
        yield Contender("backward", "shipped", start)
    for name, config in getattr(tuning, "candidates", lambda *_: {})(card, dim, dim, dtype).items():
        start = _our_backward(first, launch.launch_attention_bwd, config)
        yield Contender(f"backward-{name}", "tune", start)


def _tma_backward(shape: Shape, dtype: torch.dtype, card: tuple[int, int]) -> Iterator[Contender]:
    module = importlib.import_module("sdx_kernels._triton.attention_tma_bwd_launch")
    forward = importlib.import_module("sdx_kernels._triton.attention_fwd").launch_attention_fwd
    tuning = importlib.import_module("sdx_kernels.tuning.attention_tma_bwd")
    fwd = importlib.import_module("sdx_kernels.tuning.attention")
    _, _, _, keys, _, dim, _ = shape
    ladder = tuning.ladder_for_tma_bwd(card, dim, dim, dtype)
    if ladder is None:
        return
    first = functools.partial(forward, ladder=fwd.ladder_for(card, dim, dim, dtype, keys))
    launch = module.launch_attention_tma_bwd
    yield Contender("backward-tma", "shipped", _our_backward(first, launch, ladder))
    for name, tried in tuning.candidates(card, dim, dim, dtype).items():
        yield Contender(f"backward-tma-{name}", "tune", _our_backward(first, launch, tried))


def _wide_backward(shape: Shape, dtype: torch.dtype, card: tuple[int, int]) -> Iterator[Contender]:
    if shape[5] <= 128:
        return
    launch = importlib.import_module("sdx_kernels._triton.attention_wide_launch")
    tuning = importlib.import_module("sdx_kernels.tuning.attention_wide")
    kind = _wide_kind(shape[5], dtype, True)
    ladder = tuning.wide_ladder_for(card, kind)
    first = functools.partial(launch.launch_attention_wide_fwd, ladder=ladder)
    steps = {"backward-wide": tuning.wide_grad_ladder_for(card, kind)}
    for name, config in tuning.grad_candidates(card, kind).items():
        steps[f"backward-wide-{name}"] = (config,)
    for name, grads in steps.items():
        if ladder and grads:
            start = _our_backward(first, launch.launch_attention_wide_bwd, grads)
            yield Contender(name, "shipped" if name == "backward-wide" else "tune", start)


def _present(
    families: tuple[Callable[..., Iterator[Contender]], ...],
    shape: Shape,
    dtype: torch.dtype,
    card: Card,
    missing: list[str],
) -> Iterator[Contender]:
    if card is None:
        return
    for family in families:
        try:
            yield from family(shape, dtype, card)
        except (ImportError, AttributeError, TypeError) as error:
            # a family that is not built yet, or not as this file expects it, is listed
            missing.append(f"{family.__name__.strip('_')}: {error}")


def forward_contenders(
    shape: Shape, dtype: torch.dtype, card: Card, missing: list[str]
) -> list[Contender]:
    """Everyone for a forward pass; families that cannot be imported are added to `missing`."""
    causal = shape[6]
    found = [_operator(name, causal) for name in IMPLEMENTATIONS]
    if causal:
        return found
    if torch.cuda.is_available() and dtype != torch.float32:
        found += _sage(missing)
    families = (_portable, _short, _tma_all, _wide)
    return found + list(_present(families, shape, dtype, card, missing))


def backward_contenders(
    shape: Shape, dtype: torch.dtype, card: Card, missing: list[str]
) -> list[Contender]:
    """Everyone for a backward pass, unmasked."""
    if shape[6]:
        return []
    peers = [Contender(n, "peer", _torch_backward(b)) for n, b in PEERS.items()]
    families = (_fused_backward, _tma_backward, _wide_backward)
    return peers + list(_present(families, shape, dtype, card, missing))


if __name__ == "__main__":
    absent: list[str] = []
    sdxl: Shape = ("sdxl-1024-self-64", 2, 4096, 4096, 10, 64, False)
    everyone = forward_contenders(sdxl, torch.float16, (9, 0), absent)
    print("at 2x10x4096^2, D 64, on sm_90:", ", ".join(c.name for c in everyone) or "nobody")
    print("missing:", ", ".join(absent) or "nothing")
