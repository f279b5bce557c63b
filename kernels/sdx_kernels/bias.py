"""Attention biases and masks as descriptions; each one's `materialize()` is its own reference.

It knows tensors and lengths, and must not know which implementation reads which bias.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from sdx_kernels.errors import InvalidInputs

__all__ = [
    "AttentionBias",
    "Band",
    "BlockDiagonalCausalFromBottomRightMask",
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask",
    "BlockDiagonalCausalLocalAttentionMask",
    "BlockDiagonalCausalMask",
    "BlockDiagonalMask",
    "KeyPaddingMask",
    "LocalAttentionFromBottomRightMask",
    "LowerTriangularFromBottomRightLocalAttentionMask",
    "LowerTriangularFromBottomRightMask",
    "LowerTriangularMask",
    "LowerTriangularMaskWithTensorBias",
    "Packed",
]


@dataclass(frozen=True, slots=True)
class Band:
    """The keys that a query may attend, as a band around a diagonal of its sequence.

    Query i attends keys i + shift − left … i + shift + right, where shift is 0 or, with
    `from_end`, the number of keys minus the number of queries.

    Attributes:
        left: keys before the diagonal; None = all.
        right: keys after it; None = all.
        from_end: whether the last query lies on the last key, instead of the first on the first.
    """

    left: int | None = None
    right: int | None = None
    from_end: bool = False

    def shift(self, queries: int, keys: int) -> int:
        """Where the diagonal starts: query 0 lies on key `shift`."""
        return keys - queries if self.from_end else 0

    def allowed(self, queries: int, keys: int, device: torch.device | str) -> torch.Tensor:
        """Bool (queries, keys), True = attend."""
        rows = torch.arange(queries, device=device)[:, None] + self.shift(queries, keys)
        columns = torch.arange(keys, device=device)[None, :]
        inside = torch.ones(queries, keys, dtype=torch.bool, device=device)
        if self.left is not None:
            inside &= columns >= rows - self.left
        if self.right is not None:
            inside &= columns <= rows + self.right
        return inside


@dataclass(frozen=True, slots=True)
class Packed:
    """Where each of several packed sequences begins, on a device.

    Attributes:
        query_starts: int32 `[n + 1]`, first query of each sequence, and the end.
        key_starts: int32 `[n + 1]`, likewise for keys.
        longest_query: most queries of one sequence.
        longest_key: most keys of one sequence.
    """

    query_starts: torch.Tensor
    key_starts: torch.Tensor
    longest_query: int
    longest_key: int


class AttentionBias:
    """A structure added to the scaled scores: 0 where a query may attend, −inf where not.

    Keys that a structure excludes are never read, so NaN there never reaches the output.
    """

    @property
    def band(self) -> Band | None:
        """The band that each sequence's queries attend; None where there is no such limit."""
        return None

    def packed(self, device: torch.device | str) -> Packed | None:
        """The sequences that one batch item packs; None where each item is one sequence."""
        return None

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


class LowerTriangularMask(AttentionBias):
    """Causal, aligned top-left: query i attends keys 0…i."""

    @property
    def band(self) -> Band:
        return Band(right=0)

    def allowed(self, shape: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
        return self.band.allowed(shape[-2], shape[-1], device)

    def add_bias(self, bias: torch.Tensor) -> "LowerTriangularMaskWithTensorBias":
        """This mask plus a tensor broadcastable to (B, H, Mq, Mk)."""
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularFromBottomRightMask(LowerTriangularMask):
    """Causal, aligned bottom-right: the last query attends all keys."""

    @property
    def band(self) -> Band:
        return Band(right=0, from_end=True)

    def add_bias(self, bias: torch.Tensor) -> "LowerTriangularMaskWithTensorBias":
        raise NotImplementedError(
            "a tensor bias can be added to LowerTriangularMask only; "
            "pass the dense sum as attn_bias instead"
        )

    def make_local_attention(
        self, window_size: int
    ) -> "LowerTriangularFromBottomRightLocalAttentionMask":
        """The same with at most `window_size` keys a query, its own included."""
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    """Causal, aligned bottom-right, each query attending the last `window_size` keys at most.

    Args:
        window_size: at least 1; the query's own key counts.
    """

    def __init__(self, window_size: int) -> None:
        self.window_size = _window(window_size, 1)

    @property
    def band(self) -> Band:
        return Band(left=self.window_size - 1, right=0, from_end=True)


class LocalAttentionFromBottomRightMask(AttentionBias):
    """A window around the diagonal, aligned bottom-right.

    Args:
        window_left: keys before the query's own; at least 0.
        window_right: keys after it; at least 0.
    """

    def __init__(self, window_left: int, window_right: int) -> None:
        self.window_left = _window(window_left, 0)
        self.window_right = _window(window_right, 0)

    @property
    def band(self) -> Band:
        return Band(self.window_left, self.window_right, from_end=True)

    def allowed(self, shape: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
        return self.band.allowed(shape[-2], shape[-1], device)


def _window(size: int, least: int) -> int:
    if size < least:
        raise InvalidInputs(f"a window of {size} keys: pass at least {least}")
    return int(size)


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
    # the starts on each device that asked: making them anew would copy to the GPU at every call
    _starts: dict[torch.device, Packed] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

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
        return cls.from_seqlens(_lengths(tensors)), _pack(tensors)

    @classmethod
    def from_tensor_lists_qkv(
        cls,
        queries: Sequence[torch.Tensor],
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor] | None = None,
    ) -> tuple["BlockDiagonalMask", torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Packs lists of queries, keys and (optional) values; the mask comes first."""
        mask = cls.from_seqlens(_lengths(queries), _lengths(keys))
        return mask, _pack(queries), _pack(keys), None if values is None else _pack(values)

    def split(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Parts a packed (1, Mq, …) tensor into one (1, M, …) view per sequence."""
        return list(tensor.split(list(self.query_lengths), dim=1))

    split_queries = split

    def split_kv(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Parts a packed (1, Mk, …) tensor into one (1, M, …) view per sequence."""
        return list(tensor.split(list(self.key_lengths), dim=1))

    def make_causal(self) -> "BlockDiagonalCausalMask":
        """The same blocks, each causal (top-left)."""
        return BlockDiagonalCausalMask(self.query_lengths, self.key_lengths)

    def make_causal_from_bottomright(self) -> "BlockDiagonalCausalFromBottomRightMask":
        """The same blocks, each causal (bottom-right); none may have more queries than keys."""
        return BlockDiagonalCausalFromBottomRightMask(self.query_lengths, self.key_lengths)

    def make_local_attention(self, window_size: int) -> "BlockDiagonalCausalLocalAttentionMask":
        """The same blocks, each causal (top-left) within a window."""
        return BlockDiagonalCausalLocalAttentionMask(
            self.query_lengths, self.key_lengths, window_size
        )

    def make_local_attention_from_bottomright(
        self, window_size: int
    ) -> "BlockDiagonalCausalLocalAttentionFromBottomRightMask":
        """The same blocks, each causal (bottom-right) within a window."""
        return BlockDiagonalCausalLocalAttentionFromBottomRightMask(
            self.query_lengths, self.key_lengths, window_size
        )

    def packed(self, device: torch.device | str) -> Packed:
        device = torch.device(device)
        if device not in self._starts:
            queries, keys = (
                torch.tensor(
                    list(itertools.accumulate(lengths, initial=0)), dtype=torch.int32, device=device
                )
                for lengths in (self.query_lengths, self.key_lengths)
            )
            # not max(…, default=0), which torch.compile cannot trace
            longest = max(0, 0, *self.query_lengths), max(0, 0, *self.key_lengths)
            self._starts[device] = Packed(queries, keys, *longest)
        return self._starts[device]

    def check(self, queries: int, keys: int) -> None:
        """Whether the blocks cover the inputs.

        Raises:
            InvalidInputs: they hold another number of queries or keys.
        """
        if (sum(self.query_lengths), sum(self.key_lengths)) != (queries, keys):
            raise InvalidInputs(
                f"the blocks hold {sum(self.query_lengths)} queries and {sum(self.key_lengths)} "
                f"keys, the inputs {queries} and {keys}"
            )

    def allowed(self, shape: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
        self.check(shape[-2], shape[-1])
        band = self.band or Band()
        lengths = zip(self.query_lengths, self.key_lengths, strict=True)
        return torch.block_diag(*(band.allowed(q, k, device) for q, k in lengths)).bool()

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_starts": {}}


def _lengths(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor.shape[1] for tensor in tensors for _ in range(tensor.shape[0])]


def _pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.reshape(1, -1, *t.shape[2:]) for t in tensors], dim=1)


class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Packed sequences, each causal (top-left)."""

    @property
    def band(self) -> Band:
        return Band(right=0)


@dataclass(frozen=True)
class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """Packed sequences, each causal (bottom-right): its last query attends all its keys."""

    def __post_init__(self) -> None:
        for queries, keys in zip(self.query_lengths, self.key_lengths, strict=True):
            if queries > keys:
                raise InvalidInputs(
                    f"a sequence of {queries} queries and {keys} keys cannot be causal from the "
                    "bottom right: its first queries would attend nothing"
                )

    @property
    def band(self) -> Band:
        return Band(right=0, from_end=True)


@dataclass(frozen=True)
class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalMask):
    """Packed sequences, each causal (top-left) within a window.

    Attributes:
        window_size: keys that a query attends at most, its own included; at least 1.
    """

    window_size: int = 1

    def __post_init__(self) -> None:
        _window(self.window_size, 1)

    @property
    def band(self) -> Band:
        return Band(left=self.window_size - 1, right=0)


class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalLocalAttentionMask):
    """Packed sequences, each causal (bottom-right) within a window."""

    @property
    def band(self) -> Band:
        return Band(left=self.window_size - 1, right=0, from_end=True)
