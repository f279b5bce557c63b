"""Turns what a caller passes to attention into one normal form, or says what is wrong with it.

It knows shapes, dtypes and devices; it must not know which implementation will run.
"""

import functools
from dataclasses import dataclass

import torch

from sdx_kernels import target
from sdx_kernels.bias import (
    AttentionBias,
    Band,
    BlockDiagonalMask,
    KeyPaddingMask,
    LocalAttentionFromBottomRightMask,
    LowerTriangularMask,
    LowerTriangularMaskWithTensorBias,
    Packed,
)
from sdx_kernels.errors import InvalidInputs

__all__ = ["AttentionInputs", "Dropout", "Signature", "attention_inputs", "settled_inputs"]

LAYOUT = "[batch, seq, heads, dim]"

#: structures that say all they mean by their band and their packed sequences
_PLAIN_STRUCTURES = (LowerTriangularMask, LocalAttentionFromBottomRightMask, BlockDiagonalMask)


@dataclass(frozen=True, eq=False, slots=True)
class Dropout:
    """Which weights are dropped: a function of `seed` and of each weight's place.

    Attributes:
        p: probability of dropping one, 0 < p < 1; the others are divided by 1 − p.
        seed: int64 tensor of one element on the inputs' device (never read by the host, so that
            a CUDA graph can draw a new one at each replay).
    """

    p: float
    seed: torch.Tensor


@dataclass(frozen=True)
class Signature:
    """Everything that selection may depend on; hashable, so that a choice is made once.

    Attributes:
        bias: "none", "float" or "bool" for the dense part.
        structure: class name of a structural mask, "" for none.
        band: "" for no band, "causal" (no key after the diagonal) or "local" (any other).
        packed: whether one batch item holds several sequences.
        key_mask: whether some keys of a batch item may not exist.
        foreign: whether the structure is a caller's own class, known by its dense mask only.
        grad: whether a gradient may be asked for; bias_grad: also for the bias.
        lse: whether the rows' log-sum-exp is returned.
        explicit: whether the caller named the implementation.
        interpreting: whether Triton would interpret kernels on the CPU.
    """

    target: target.Target
    dtype: torch.dtype
    output_dtype: torch.dtype
    batch: int
    queries: int
    keys: int
    heads: int
    key_heads: int
    head_dim: int
    value_dim: int
    bias: str = "none"
    bias_dtype: torch.dtype | None = None
    structure: str = ""
    band: str = ""
    packed: bool = False
    key_mask: bool = False
    foreign: bool = False
    grad: bool = False
    bias_grad: bool = False
    dropout: float = 0.0
    lse: bool = False
    explicit: bool = False
    interpreting: bool = False

    @property
    def empty(self) -> bool:
        """True when an output or a sum over keys or channels has no elements."""
        sizes = (self.batch, self.queries, self.keys, self.heads, self.head_dim, self.value_dim)
        return 0 in sizes


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """Attention's arguments in one form: BMHK tensors of one dtype on one device.

    Attributes:
        query: `[B, Mq, H, K]`.
        key: `[B, Mk, Hk, K]`, H a multiple of Hk; query head h reads key head h // (H // Hk).
        value: `[B, Mk, Hk, Kv]`.
        bias: dense float or bool tensor `[B|1, H|1, Mq|1, Mk|1]`, or None.
        band: keys that a query may attend, or None.
        packed: sequences within a batch of one, or None.
        key_mask: bool `[B, Mk]`, True = the key exists, or None.
        allowed: bool `[B|1, H|1, Mq|1, Mk|1]` of a caller's own structure, or None.
        dropout: which weights are dropped, or None.
        scale: factor of the scores.
        output_dtype: dtype of the result.
        shape: shape of the result in the caller's layout.
        bias_type: type of the caller's bias, for messages.
        signature: what selection looks at.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    bias: torch.Tensor | None
    band: Band | None
    packed: Packed | None
    key_mask: torch.Tensor | None
    allowed: torch.Tensor | None
    dropout: Dropout | None
    scale: float
    output_dtype: torch.dtype
    shape: tuple[int, ...]
    bias_type: type
    signature: Signature

    @property
    def scores_shape(self) -> tuple[int, int, int, int]:
        """(B, H, Mq, Mk)."""
        s = self.signature
        return s.batch, s.heads, s.queries, s.keys

    def describe(self) -> list[str]:
        """One line per argument, for error messages."""
        named = (("query", self.query), ("key", self.key), ("value", self.value))
        lines = [f"{name:<12}: shape={tuple(t.shape)} ({t.dtype})" for name, t in named]
        return [
            *lines,
            f"{'attn_bias':<12}: {self.bias_type}",
            f"{'p':<12}: {self.signature.dropout}",
        ]


def _same_device(named: dict[str, torch.Tensor | None]) -> None:
    first_name, first = next((n, t) for n, t in named.items() if t is not None)
    for name, tensor in named.items():
        if tensor is not None and tensor.device != first.device:
            raise InvalidInputs(
                f"{first_name} is on {first.device} and {name} on {tensor.device}: "
                f"move them to one device"
            )


def _compute_dtype(tensors: tuple[torch.Tensor, ...]) -> torch.dtype:
    for tensor in tensors:
        if not tensor.is_floating_point():
            raise InvalidInputs(
                f"attention takes floating-point tensors, got {tensor.dtype}: convert it first"
            )
    promoted = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    device_type = tensors[0].device.type
    # like torch's own autocast, which leaves float64 alone
    if promoted != torch.float64 and _autocast(device_type):
        return torch.get_autocast_dtype(device_type)
    return promoted


def _autocast(device_type: str) -> bool:
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def _bmhk(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """Any of the three layouts as BMHK, and the shape of the result in the caller's layout."""
    shapes = tuple(query.shape), tuple(key.shape), tuple(value.shape)
    got = f"query {shapes[0]}, key {shapes[1]}, value {shapes[2]}"
    rank = query.dim()
    if rank not in (3, 4, 5) or key.dim() != rank or value.dim() != rank:
        raise InvalidInputs(
            f"attention takes three tensors laid out as {LAYOUT} (or [batch, seq, dim], or "
            f"[batch, seq, groups, heads, dim]); got {got}"
        )
    result = (*shapes[0][:-1], shapes[2][-1])
    if (
        shapes[0][0] != shapes[1][0]
        or shapes[1][:-1] != shapes[2][:-1]
        or shapes[0][-1] != shapes[1][-1]
        or (rank == 4 and shapes[0][2] != shapes[1][2])
        or (rank == 5 and shapes[0][2] != shapes[1][2])
        or (rank == 5 and shapes[1][3] not in (1, shapes[0][3]))
    ):
        raise InvalidInputs(
            f"query, key and value disagree in the layout {LAYOUT}: batch and heads must be the "
            f"same for all, seq the same for key and value, dim the same for query and key; "
            f"got {got}. Tensors laid out as [batch, heads, seq, dim] need .transpose(1, 2); key "
            f"heads shared by several query heads need [batch, seq, groups, heads, dim]"
        )
    if rank == 3:
        return query.unsqueeze(2), key.unsqueeze(2), value.unsqueeze(2), result
    if rank == 5:
        # a key head expanded over its group's query heads is read once, not copied; but where a
        # gradient is asked for, each of the copies has its own
        derived = torch.is_grad_enabled() and (key.requires_grad or value.requires_grad)
        if query.shape[3] > 1 and key.stride(3) == 0 and value.stride(3) == 0 and not derived:
            key, value = key[:, :, :, :1], value[:, :, :, :1]
        query, key, value = query.flatten(2, 3), key.flatten(2, 3), value.flatten(2, 3)
    return query, key, value, result


def _dense_bias(
    bias: torch.Tensor, rank: int, groups: tuple[int, ...], scores: tuple[int, int, int, int]
) -> torch.Tensor:
    """A tensor bias as a 4-D view, checked against the scores' shape (B, H, Mq, Mk)."""
    if not (bias.dtype == torch.bool or bias.is_floating_point()):
        raise InvalidInputs(
            f"attn_bias of {bias.dtype}: pass a bool tensor (True = attend) or a float one that "
            f"is added to the scores; 0/1 integers need .bool()"
        )
    given = tuple(bias.shape)
    if rank == 3 and bias.dim() == 3:
        bias = bias.unsqueeze(1)
    if rank == 5 and bias.dim() == 5:
        shared = bias.shape[1] == bias.shape[2] == 1
        spread = bias if shared else bias.expand(-1, *groups, -1, -1)
        bias = spread.flatten(1, 2)
    while bias.dim() < 4:
        bias = bias.unsqueeze(0)
    fits = bias.dim() == 4 and all(
        size in (1, want) for size, want in zip(bias.shape, scores, strict=True)
    )
    if not fits:
        raise InvalidInputs(
            f"attn_bias of shape {given} cannot be broadcast to the scores (batch, heads, "
            f"queries, keys) = {scores}: its last size must be 1 or the {scores[3]} keys, not "
            f"{given[-1] if given else 'absent'}, and the others 1 or {scores[:3]}"
        )
    return bias


def attention_inputs(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    output_dtype: torch.dtype | None = None,
    *,
    lse: bool = False,
    explicit: bool = False,
) -> AttentionInputs:
    """Checks and normalises attention's arguments; never writes or keeps a caller's tensor.

    Raises:
        InvalidInputs: shapes, dtypes, devices or `p` that no implementation could take.
    """
    bias_type = type(attn_bias)
    structure = attn_bias if isinstance(attn_bias, AttentionBias) else None
    dense: torch.Tensor | None = None
    key_mask: torch.Tensor | None = None
    if isinstance(attn_bias, KeyPaddingMask):
        key_mask = attn_bias.mask
    elif isinstance(attn_bias, LowerTriangularMaskWithTensorBias):
        dense = attn_bias.bias
    elif isinstance(attn_bias, torch.Tensor):
        dense = attn_bias
    elif attn_bias is not None and structure is None:
        raise InvalidInputs(
            f"attn_bias of {bias_type}: pass None, a tensor or one of sdx_kernels' bias classes"
        )
    if not 0.0 <= p <= 1.0:
        raise InvalidInputs(f"the dropout probability p must be between 0 and 1, got {p}")
    if output_dtype is not None and not output_dtype.is_floating_point:
        raise InvalidInputs(f"output_dtype={output_dtype}: a weighted mean needs a floating dtype")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, torch.Tensor):
            raise InvalidInputs(f"{name} is a {type(tensor).__name__}, not a torch.Tensor")
    mask = key_mask if dense is None else dense
    _same_device({"query": query, "key": key, "value": value, "attn_bias": mask})
    groups = tuple(query.shape[2:4])
    rank = query.dim()
    query, key, value, shape = _bmhk(query, key, value)
    batch, queries, heads, head_dim = query.shape
    scores = (batch, heads, queries, key.shape[1])
    if dense is not None:
        dense = _dense_bias(dense, rank, groups, scores)
    if key_mask is not None:
        key_mask = _key_mask(key_mask, batch, key.shape[1])
    packed, allowed = _structure(structure, scores, query.device)
    dtype = _compute_dtype((query, key, value))
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if scale is None:
        scale = head_dim**-0.5 if head_dim else 1.0
    return settled_inputs(
        query,
        key,
        value,
        dense,
        band=structure.band if structure is not None and allowed is None else None,
        packed=packed,
        key_mask=key_mask,
        allowed=allowed,
        scale=float(scale),
        output_dtype=output_dtype or dtype,
        p=float(p),
        lse=lse,
        explicit=explicit,
        structure="" if structure is None else type(structure).__name__,
        shape=shape,
        bias_type=bias_type,
    )


def _key_mask(mask: torch.Tensor, batch: int, keys: int) -> torch.Tensor:
    if mask.shape[0] not in (1, batch) or mask.shape[1] != keys:
        raise InvalidInputs(
            f"KeyPaddingMask of shape {tuple(mask.shape)} does not fit (batch, keys) = "
            f"{(batch, keys)}"
        )
    return mask.expand(batch, keys)


def _structure(
    structure: AttentionBias | None, scores: tuple[int, int, int, int], device: torch.device
) -> tuple[Packed | None, torch.Tensor | None]:
    """Packed sequences of a structure, or the dense mask of one that is not ours."""
    if structure is None or isinstance(structure, KeyPaddingMask):
        return None, None
    plain = any(type(structure).allowed is known.allowed for known in _PLAIN_STRUCTURES)
    if not plain:
        allowed = structure.allowed(scores, device)
        return None, allowed[(None,) * (4 - allowed.dim())]
    if not isinstance(structure, BlockDiagonalMask):
        return None, None
    if scores[0] != 1:
        raise InvalidInputs(
            f"{type(structure).__name__} parts the length of a batch of one; got a batch of "
            f"{scores[0]}: pack the items along the length"
        )
    structure.check(scores[2], scores[3])
    return structure.packed(device), None


def settled_inputs(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    scale: float,
    output_dtype: torch.dtype,
    band: Band | None = None,
    packed: Packed | None = None,
    key_mask: torch.Tensor | None = None,
    allowed: torch.Tensor | None = None,
    dropout: Dropout | None = None,
    p: float = 0.0,
    lse: bool = False,
    explicit: bool = False,
    structure: str = "",
    shape: tuple[int, ...] | None = None,
    bias_type: type | None = None,
) -> AttentionInputs:
    """Inputs that are checked and converted already, with the signature that describes them."""
    batch, queries, heads, head_dim = query.shape
    grad = torch.is_grad_enabled()
    bias_grad = grad and bias is not None and bias.requires_grad
    causal = band is not None and band.left is None and band.right == 0
    signature = Signature(
        target=target.of(query.device),
        dtype=query.dtype,
        output_dtype=output_dtype,
        batch=batch,
        queries=queries,
        keys=key.shape[1],
        heads=heads,
        key_heads=key.shape[2],
        head_dim=head_dim,
        value_dim=value.shape[3],
        bias="none" if bias is None else "bool" if bias.dtype == torch.bool else "float",
        bias_dtype=None if bias is None else bias.dtype,
        structure=structure,
        band="" if band is None else "causal" if causal else "local",
        packed=packed is not None,
        key_mask=key_mask is not None,
        foreign=allowed is not None,
        grad=bias_grad or (grad and any(t.requires_grad for t in (query, key, value))),
        bias_grad=bias_grad,
        dropout=p,
        lse=lse,
        explicit=explicit,
        interpreting=target.interpreting(),
    )
    return AttentionInputs(
        query,
        key,
        value,
        bias,
        band,
        packed,
        key_mask,
        allowed,
        dropout,
        scale,
        output_dtype,
        (batch, queries, heads, value.shape[3]) if shape is None else shape,
        bias_type or type(bias),
        signature,
    )
