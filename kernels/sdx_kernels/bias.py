"""Attention biases and masks as descriptions; each one's `materialize()` is its own reference.

It knows tensors and lengths, and must not know which implementation reads which bias.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from sdx_kernels.errors import InvalidInputs

__all__ = [
    "AttentionBias",
    "BlockDiagonalCausalMask",
    "BlockDiagonalMask",
    "KeyPaddingMask",
    "LowerTriangularFromBottomRightMask",
    "LowerTriangularMask",
    "LowerTriangularMaskWithTensorBias",
]


class AttentionBias:
    """A structure added to the scaled scores: 0 where a query may attend, −inf where not.

    Keys that a structure excludes are never read, so NaN there never reaches the output.
    """

    def allowed(self, shape: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
        """Boolean mask, True = attend, broadcastable to `shape` (B, H, Mq, Mk)."""
        raise NotImplementedError

    def materialize(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> torch.Tensor:
        """The bias as a dense tensor.

        Args:
            shape: `(..., Mq, Mk)`.
            dtype: floating dtype of the result. Default: float32.
            device: where to build it. Default: the CPU.

        Returns:
            A tensor of `shape` to add to the scaled scores.
        """
        dense = torch.zeros(tuple(shape), dtype=dtype, device=device)
        return dense.masked_fill(~self.allowed(shape, device), -math.inf)


def _triangle(queries: int, keys: int, offset: int, device: torch.device | str) -> torch.Tensor:
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(offset)


class LowerTriangularMask(AttentionBias):
    """Causal, aligned top-left: query i attends keys 0…i."""

    def offset(self, queries: int, keys: int) -> int:
        """Query i attends keys up to i + offset."""
        return 0

    def allowed(self, shape: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
        queries, keys = shape[-2], shape[-1]
        return _triangle(queries, keys, self.offset(queries, keys), device)

    def add_bias(self, bias: torch.Tensor) -> "LowerTriangularMaskWithTensorBias":
        """This mask plus a tensor broadcastable to (B, H, Mq, Mk)."""
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularFromBottomRightMask(LowerTriangularMask):
    """Causal, aligned bottom-right: the last query attends all keys."""

    def offset(self, queries: int, keys: int) -> int:
        return keys - queries

    def add_bias(self, bias: torch.Tensor) -> "LowerTriangularMaskWithTensorBias":
        raise NotImplementedError(
            "a tensor bias can be added to LowerTriangularMask only; "
            "pass the dense sum as attn_bias instead"
        )


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """Causal (top-left) plus a float or boolean tensor broadcastable to (B, H, Mq, Mk)."""

    def __init__(self, bias: torch.Tensor) -> None:
        self.bias = bias

    def materialize(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> torch.Tensor:
        bias = self.bias.to(device)
        if bias.dtype == torch.bool:
            bias = torch.zeros_like(bias, dtype=dtype).masked_fill(~bias, -math.inf)
        return super().materialize(shape, dtype, device) + bias.to(dtype)


class KeyPaddingMask(AttentionBias):
    """Which keys of each batch item exist, for prompts of different lengths in one batch.

    Args:
        mask: bool, shape `(B, Mk)`, True = the key exists and is attended.
    """

    def __init__(self, mask: torch.Tensor) -> None:
        if mask.dtype != torch.bool or mask.dim() != 2:
            raise InvalidInputs(
                f"KeyPaddingMask takes a bool tensor (batch, keys), True = attend; got "
                f"{mask.dtype} of shape {tuple(mask.shape)}"
            )
        self.mask = mask

    def allowed(self, shape: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
        return self.mask.to(device)[:, None, None, :]


@dataclass(frozen=True)
class BlockDiagonalMask(AttentionBias):
    """Several sequences packed along the length of a batch of one; each attends itself only.

    Attributes:
        query_lengths: length of each sequence's queries; their sum is Mq.
        key_lengths: length of each sequence's keys; their sum is Mk.
    """

    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Iterable[int], kv_seqlen: Iterable[int] | None = None
    ) -> "BlockDiagonalMask":
        """From the lengths of queries and (default: the same) of keys."""
        queries = tuple(int(length) for length in q_seqlen)
        keys = queries if kv_seqlen is None else tuple(int(length) for length in kv_seqlen)
        if len(queries) != len(keys) or min(queries + keys, default=0) < 0:
            raise InvalidInputs(
                f"q_seqlen and kv_seqlen need one non-negative length per sequence; got "
                f"{len(queries)} and {len(keys)} entries"
            )
        return cls(queries, keys)

    @classmethod
    def from_tensor_list(
        cls, tensors: Sequence[torch.Tensor]
    ) -> tuple["BlockDiagonalMask", torch.Tensor]:
        """Packs tensors (B, M, …) along M into (1, ΣB·M, …) with the mask that parts them."""
        lengths = [tensor.shape[1] for tensor in tensors for _ in range(tensor.shape[0])]
        packed = torch.cat([t.reshape(1, -1, *t.shape[2:]) for t in tensors], dim=1)
        return cls.from_seqlens(lengths), packed

    def split(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Parts a packed (1, Mq, …) tensor into one (1, M, …) view per sequence."""
        return list(tensor.split(list(self.query_lengths), dim=1))

    def split_kv(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Parts a packed (1, Mk, …) tensor into one (1, M, …) view per sequence."""
        return list(tensor.split(list(self.key_lengths), dim=1))

    def make_causal(self) -> "BlockDiagonalCausalMask":
        """The same blocks, each causal (top-left)."""
        return BlockDiagonalCausalMask(self.query_lengths, self.key_lengths)

    def _block(self, queries: int, keys: int, device: torch.device | str) -> torch.Tensor:
        return torch.ones(queries, keys, dtype=torch.bool, device=device)

    def allowed(self, shape: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
        if (sum(self.query_lengths), sum(self.key_lengths)) != tuple(shape[-2:]):
            raise InvalidInputs(
                f"the blocks hold {sum(self.query_lengths)} queries and {sum(self.key_lengths)} "
                f"keys, the inputs {shape[-2]} and {shape[-1]}"
            )
        lengths = zip(self.query_lengths, self.key_lengths, strict=True)
        return torch.block_diag(*(self._block(q, k, device) for q, k in lengths)).bool()


class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Packed sequences, each causal (top-left)."""

    def _block(self, queries: int, keys: int, device: torch.device | str) -> torch.Tensor:
        return _triangle(queries, keys, 0, device)
