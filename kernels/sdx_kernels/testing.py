"""What tests and benchmarks of kernels share: truth in fp64, tolerances, odd shapes, poison.

It knows the reference and must not know the operators it is used on.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from sdx_kernels.bias import AttentionBias, LowerTriangularMaskWithTensorBias
from sdx_kernels.reference.attention import attention
from sdx_kernels.registry import TOLERANCE

__all__ = [
    "HEAD_DIMS",
    "ODD_LENGTHS",
    "REAL_SHAPES",
    "assert_close",
    "at_end_of_nan",
    "largest_error",
    "math_peer",
    "poisoned_empty",
    "random_inputs",
    "reference64",
]

#: key lengths around every block size, none a friendly one
ODD_LENGTHS = (1, 7, 8, 9, 31, 33, 43, 77, 129)

#: head dims of real models and the awkward ones between them
HEAD_DIMS = (1, 3, 8, 20, 36, 40, 48, 72, 80, 88, 96, 112, 120, 136, 160, 200, 256)

#: (name, batch, queries, keys, heads, head dim, causal): what pictures and prompts really launch
REAL_SHAPES = (
    ("sdxl-1024-self-64", 2, 4096, 4096, 10, 64, False),
    ("sdxl-1024-self-32", 2, 1024, 1024, 20, 64, False),
    ("sdxl-1024-cross-64", 2, 4096, 77, 10, 64, False),
    ("sdxl-1024-cross-32", 2, 1024, 77, 20, 64, False),
    ("sdxl-2048-self-128", 2, 16384, 16384, 10, 64, False),
    ("sd15-512-self-64", 2, 4096, 4096, 8, 40, False),
    ("sd15-512-self-32", 2, 1024, 1024, 8, 80, False),
    ("sd15-512-self-16", 2, 256, 256, 8, 160, False),
    ("vae-1024-middle", 1, 16384, 16384, 1, 512, False),
    ("clip-l", 2, 77, 77, 12, 64, True),
    ("clip-bigg", 2, 77, 77, 20, 64, True),
    ("animatediff-temporal", 8192, 16, 16, 8, 40, False),
)


def random_inputs(
    batch: int,
    queries: int,
    keys: int,
    heads: int,
    head_dim: int,
    value_dim: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Unit-normal query, key and value in BMHK, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        (batch, queries, heads, head_dim),
        (batch, keys, heads, head_dim),
        (batch, keys, heads, head_dim if value_dim is None else value_dim),
    )
    q, k, v = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    return q, k, v


def _parts(
    attn_bias: torch.Tensor | AttentionBias | None, shape: tuple[int, ...], device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if isinstance(attn_bias, AttentionBias):
        dense = attn_bias.bias if isinstance(attn_bias, LowerTriangularMaskWithTensorBias) else None
        return dense, attn_bias.allowed(shape, device)
    return attn_bias, None


def reference64(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | AttentionBias | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention in float64 on the already rounded inputs; `[B, Mq, H, Kv]` in float64."""
    shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    bias, allowed = _parts(attn_bias, shape, query.device)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    out, _ = attention(
        query.double(), key.double(), value.double(), scale=scale, bias=bias, allowed=allowed
    )
    return out


def math_peer(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | AttentionBias | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Torch's own MATH attention in the inputs' dtype: what our error is measured against."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mask: torch.Tensor | None
    if isinstance(attn_bias, AttentionBias):
        shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
        mask = attn_bias.materialize(shape, query.dtype, query.device)
    elif attn_bias is not None and attn_bias.dtype != torch.bool:
        mask = attn_bias.to(query.dtype)
    else:
        mask = attn_bias
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out.transpose(1, 2)


def largest_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """max |actual − expected|; infinity when one of them is NaN where the other is not."""
    actual, expected = actual.double(), expected.double()
    if actual.shape != expected.shape or not torch.equal(actual.isnan(), expected.isnan()):
        return math.inf
    difference = (actual - expected).abs().nan_to_num(nan=0.0, posinf=math.inf)
    return difference.max().item() if difference.numel() else 0.0


def assert_close(
    actual: torch.Tensor,
    expected: torch.Tensor,
    *,
    peer: torch.Tensor | None = None,
    factor: float = 2.0,
    limit: float | None = None,
) -> None:
    """Holds a result to the published tolerance.

    The error against `expected` (fp64 on the rounded inputs) may be at most
    max(factor · peer's error, 4 · eps · max |expected|), and never above `limit`.

    Args:
        actual: result in its own dtype.
        expected: the truth, float64.
        peer: torch's MATH result in the same dtype on the same device. Default: none, and only
            `limit` holds.
        factor: 2 for outputs, 3 for gradients.
        limit: absolute bound. Default: the dtype's entry of the tolerance table.

    Raises:
        AssertionError: the bound is broken; the message has both errors.
    """
    error = largest_error(actual, expected)
    bound = TOLERANCE[actual.dtype] if limit is None else limit
    if peer is not None:
        eps = 4 * torch.finfo(actual.dtype).eps * expected.abs().nan_to_num().max().item()
        bound = min(bound, max(factor * largest_error(peer, expected), eps))
    if not error <= bound:
        raise AssertionError(f"largest error {error:.3g} is above {bound:.3g} ({actual.dtype})")


def at_end_of_nan(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as a view that ends exactly where a NaN-filled buffer ends, NaN before it."""
    buffer = tensor.new_full((tensor.numel() + 4096,), math.nan)
    view = buffer[4096:].view(tensor.shape)
    view.copy_(tensor)
    return view


@contextlib.contextmanager
def poisoned_empty() -> Iterator[None]:
    """Fills what `torch.empty` and `torch.empty_like` return with NaN, so that holes show."""
    plain, plain_like = torch.empty, torch.empty_like

    def fill(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        return fill(plain(*args, **kwargs))

    def empty_like(*args: Any, **kwargs: Any) -> torch.Tensor:
        return fill(plain_like(*args, **kwargs))

    torch.empty, torch.empty_like = empty, empty_like
    try:
        yield
    finally:
        torch.empty, torch.empty_like = plain, plain_like
