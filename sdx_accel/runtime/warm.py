"""Attention at the shapes that real models have: what the registry picks, and compiling it ahead.

Knows shapes and the attention operator; knows no pipeline and prints nothing.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["SHAPES", "AttentionShape", "warm_kernels", "what_runs"]


@dataclass(frozen=True)
class AttentionShape:
    """One attention call of one picture.

    Attributes:
        name: where it comes from.
        queries, keys: sequence lengths.
        heads, head_dim: as the model has them.
        mask: "" for none, "causal" for a triangle, "bias" for a tensor.
    """

    name: str
    queries: int
    keys: int
    heads: int
    head_dim: int
    mask: str = ""


# SDXL at 1024 x 1024, SD 1.5 at 512 x 512, and their CLIP text encoders; the VAE's single head of
# 512 is wider than any kernel of ours
SHAPES = (
    AttentionShape("SDXL self", 4096, 4096, 10, 64),
    AttentionShape("SDXL self, inner", 1024, 1024, 20, 64),
    AttentionShape("SDXL cross", 4096, 77, 10, 64),
    AttentionShape("SDXL cross, inner", 1024, 77, 20, 64),
    AttentionShape("SDXL cross, masked", 4096, 77, 10, 64, "bias"),
    AttentionShape("SD 1.5 self", 4096, 4096, 8, 40),
    AttentionShape("SD 1.5 self, inner", 1024, 1024, 8, 80),
    AttentionShape("SD 1.5 self, innermost", 256, 256, 8, 160),
    AttentionShape("SD 1.5 cross", 4096, 77, 8, 40),
    AttentionShape("SD 1.5 cross, inner", 1024, 77, 8, 80),
    AttentionShape("SD 1.5 cross, innermost", 256, 77, 8, 160),
    AttentionShape("CLIP text", 77, 77, 12, 64, "causal"),
)
DISPLAY_NAMES = {"triton": "our Triton kernel", "sdpa": "torch's SDPA", "reference": "plain torch"}


def what_runs(capability: tuple[int, int], card: str = "") -> str:
    """One sentence on what the registry picks on a card, in fp16; needs no such card.

    Args:
        capability: CUDA compute capability, from (8, 0) on.
        card: its name, for what `bench --tune` measured on it.
    """
    plain, why = _pick(SHAPES[0], capability, card)
    masked, _ = _pick(SHAPES[4], capability, card)
    reason = f" ({why})" if why else ""
    if plain == masked:
        return f"attention by {plain}{reason}"
    return f"attention by {plain}{reason}; with a mask by {masked}"


def _pick(shape: AttentionShape, capability: tuple[int, int], card: str) -> tuple[str, str]:
    """The implementation's name for people, and why ours is passed over, "" if it is not."""
    import torch

    from sdx_kernels.checks import Signature
    from sdx_kernels.ops.attention_impls import OPERATOR
    from sdx_kernels.target import Target

    signature = Signature(
        target=Target("cuda", capability, name=card),
        dtype=torch.float16,
        output_dtype=torch.float16,
        batch=2,
        queries=shape.queries,
        keys=shape.keys,
        heads=shape.heads,
        key_heads=shape.heads,
        head_dim=shape.head_dim,
        value_dim=shape.head_dim,
        bias="float" if shape.mask == "bias" else "none",
        bias_dtype=torch.float16 if shape.mask == "bias" else None,
        structure="LowerTriangularMask" if shape.mask == "causal" else "",
        band="causal" if shape.mask == "causal" else "",
    )
    choice = OPERATOR.select(signature)
    if choice is None:
        return "nothing", ""
    passed_over = choice.reasons.get("triton", ())
    return DISPLAY_NAMES.get(choice.name, choice.name), "; ".join(passed_over)


def warm_kernels(device: Any = None) -> str:
    """Run attention once at every real shape, so that its kernels are compiled and cached.

    Args:
        device: a torch device; the current CUDA device by default, the CPU without one.

    Returns:
        One sentence: what was compiled in how many seconds, or why there is nothing to warm.
    """
    import torch

    from sdx_accel.runtime.kernel_cache import ensure_kernel_cache
    from sdx_kernels import target
    from sdx_kernels.ops.attention import attend

    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type != "cuda":
        return "no NVIDIA GPU that torch can use: nothing to warm"
    if not target.triton_status()[0]:
        return f"{target.triton_status()[1]}: nothing to warm"
    ensure_kernel_cache()
    started = time.perf_counter()
    ran: dict[str, int] = {}
    for query, key, bias in _inputs(device):
        choice = attend(query, key, key, bias)[1]
        ran[choice.name] = ran.get(choice.name, 0) + 1
    torch.cuda.synchronize(device)
    seconds = time.perf_counter() - started
    picks = ", ".join(f"{DISPLAY_NAMES.get(name, name)} at {n}" for name, n in sorted(ran.items()))
    return f"ready in {seconds:.1f} s on {target.of(device).name}: {picks} shapes"


def _inputs(device: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Query, key and mask of every shape in fp16 and, where the card has it, bf16."""
    import torch

    from sdx_kernels import LowerTriangularMask, target

    has_bf16 = (target.of(device).capability or (0, 0)) >= (8, 0)
    for dtype in (torch.float16, torch.bfloat16) if has_bf16 else (torch.float16,):
        for shape in SHAPES:
            # zeros: what is compiled does not depend on values
            query = torch.zeros(
                1, shape.queries, shape.heads, shape.head_dim, dtype=dtype, device=device
            )
            key = torch.zeros(
                1, shape.keys, shape.heads, shape.head_dim, dtype=dtype, device=device
            )
            bias: Any = None
            if shape.mask == "bias":
                bias = torch.zeros(1, 1, 1, shape.keys, dtype=dtype, device=device)
            elif shape.mask == "causal":
                bias = LowerTriangularMask()
            yield query, key, bias
