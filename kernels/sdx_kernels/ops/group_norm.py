"""Group norm of channels-last tensors, whole or in parts whose statistics are gathered.

Torch's own group norm reads a picture's statistics with one block a group (32 blocks on a card of
132 multiprocessors: half the time of SDXL's decode on an H200) and gives channels-last inputs back
in another layout, which costs a copy before every convolution.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sdx_kernels import target
from sdx_kernels.errors import InvalidInputs
from sdx_kernels.reference import group_norm as reference
from sdx_kernels.tuning.group_norm import slots_for

__all__ = ["GroupMoments", "group_norm", "implementation", "store_rows", "upsampled_rows"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def implementation(device: torch.device, dtype: torch.dtype) -> str:
    """ "triton" where our kernels run by themselves, else "reference"."""
    if device.type == "meta":
        # memory is traced as on a card
        return "triton"
    card = target.of(device)
    served = card.kind == "cuda" and dtype in _DTYPES and target.triton_status()[0]
    if served and dtype == torch.bfloat16 and card.capability is not None:
        served = card.capability >= (8, 0)
    return "triton" if served and not target.interpreting() else "reference"


class GroupMoments:
    """Statistics of a picture's groups, gathered from parts of its rows.

    Each part is stored with `store`, in any order, once; then `normalized` gives rows of the whole.
    Means and squared deviations are merged as Chan, Golub and LeVeque (1983) do; sums of squares
    would cancel where a group's mean is large beside its deviation.

    Args:
        like: a tensor of the picture's device and dtype, (B, C, …).
        parts: pixels a picture of each part.
        op: "triton" or "reference"; default: whichever runs here by itself.
    """

    def __init__(self, like: Tensor, parts: Sequence[int], op: str | None = None) -> None:
        self.op = op or implementation(like.device, like.dtype)
        batch, self.channels = like.shape[:2]
        slots = [-(-pixels // reference.STRIP) for pixels in parts]
        if self.op == "triton":
            slots = [slots_for(self.channels, pixels) for pixels in parts]
        self.first = [sum(slots[:index]) for index in range(len(slots))]
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        shape = (batch, sum(slots), 2, self.channels)
        self.moments = torch.empty(shape, dtype=dtype, device=like.device)
        self.counts = torch.empty(sum(slots), dtype=dtype, device=like.device)
        self.factors: Tensor | None = None

    def store(
        self,
        part: int,
        rows: Tensor,
        out: Tensor | None = None,
        *,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        divisor: float = 1.0,
    ) -> None:
        """Writes (rows + bias + residual) / divisor to `out` and takes it into the statistics.

        Args:
            part: which of the parts this is.
            rows: (B, C, rows, W).
            out: where to; may be `residual`; default: `rows`.
            bias: (C,), added to every pixel.
            residual: as `rows`.
            divisor: what the sum is divided by.
        """
        _store(self.op, rows, out, bias, residual, divisor, self, part)

    def settle(
        self, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5
    ) -> None:
        """Ends the gathering: from all parts, the factor and the offset of each channel."""
        if self.moments.is_meta:
            self.factors = self.moments.new_empty((self.moments.shape[0], 2, self.channels))
        elif self.op == "triton":
            from sdx_kernels._triton.group_norm import affine

            self.factors = affine(self.moments, self.counts, groups, weight, bias, eps)
        else:
            self.factors = reference.affine(self.moments, self.counts, groups, weight, bias, eps)

    def normalized(self, source: Tensor, top: int, bottom: int, *, silu: bool = False) -> Tensor:
        """Rows `top`…`bottom` of `source`, normalised, channels last; rows outside it are zeros.

        Args:
            source: (B, C, H, W), channels last, whose statistics these are.
            top: the first row; may be negative.
            bottom: the row after the last; may be above H.
            silu: put them through SiLU.
        """
        assert self.factors is not None, "settle() comes first"
        batch, channels, _, width = source.shape
        out = torch.empty(
            (batch, channels, bottom - top, width),
            dtype=source.dtype,
            device=source.device,
            memory_format=torch.channels_last,
        )
        if out.is_meta:
            return out
        if self.op == "triton":
            from sdx_kernels._triton.group_norm import normalized_rows

            normalized_rows(_rows_last(source), self.factors, top, out, silu)
        else:
            reference.normalized_rows(source, self.factors, top, out, silu)
        return out


def _store(
    op: str,
    rows: Tensor,
    out: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    divisor: float,
    moments: GroupMoments | None,
    part: int,
) -> None:
    out = rows if out is None else out
    if rows.is_meta:
        return
    gathered = (
        (None, None, 0)
        if moments is None
        else (moments.moments, moments.counts, moments.first[part])
    )
    if op == "reference":
        reference.store_rows(rows, out, bias, residual, divisor, *gathered)
        return
    from sdx_kernels._triton.group_norm import store_rows

    residual = None if residual is None else _rows_last(residual)
    store_rows(_rows_last(rows), _required(out), bias, residual, divisor, *gathered)


def store_rows(
    rows: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    divisor: float = 1.0,
    op: str | None = None,
) -> None:
    """Writes (rows + bias + residual) / divisor to `out`, without statistics.

    Shapes as in `GroupMoments.store`.
    """
    op = op or implementation(rows.device, rows.dtype)
    _store(op, rows, out, bias, residual, divisor, None, 0)


def upsampled_rows(source: Tensor, top: int, bottom: int, *, op: str | None = None) -> Tensor:
    """Rows `top`…`bottom` of a picture at twice its size, by nearest pixel; outside it zeros.

    Args:
        source: (B, C, H, W).
        top: the first row of the large picture; may be negative.
        bottom: the row after the last; may be above 2 H.
        op: "triton" or "reference"; default: whichever runs here by itself.

    Returns:
        (B, C, bottom - top, 2 W), channels last.
    """
    batch, channels, _, width = source.shape
    out = torch.empty(
        (batch, channels, bottom - top, 2 * width),
        dtype=source.dtype,
        device=source.device,
        memory_format=torch.channels_last,
    )
    if out.is_meta:
        return out
    if (op or implementation(source.device, source.dtype)) == "triton":
        from sdx_kernels._triton.group_norm import upsampled_rows as launch

        launch(_rows_last(source), top, out)
    else:
        reference.upsampled_rows(source, top, out)
    return out


def _is_rows_last(tensor: Tensor) -> bool:
    """Whether a picture's pixels follow each other, each with its channels together."""
    _, channels, height, width = tensor.shape
    _, channel, row, pixel = tensor.stride()
    return (
        (channel == 1 or channels == 1)
        and (pixel == channels or width == 1)
        and (row == width * channels or height == 1)
    )


def _rows_last(tensor: Tensor) -> Tensor:
    if _is_rows_last(tensor):
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last)


def _required(out: Tensor) -> Tensor:
    if not _is_rows_last(out):
        raise InvalidInputs("out must be channels last: its pixels' channels lie together")
    return out


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    silu: bool = False,
    op: str | None = None,
) -> Tensor:
    """Group normalisation (Wu and He 2018), optionally with SiLU, in fp32 inside.

    Args:
        input: (B, C, H, W); read channels last (copied where it is not).
        num_groups: C must divide by it.
        weight, bias: (C,), or both None.
        eps: added to the variance.
        silu: put the result through SiLU in the same pass.
        op: "triton" or "reference"; default: whichever runs here by itself.

    Returns:
        (B, C, H, W) of the input's dtype, channels last.

    Raises:
        ValueError: shapes do not fit each other, or `op` is unknown.
    """
    if input.dim() != 4:
        raise InvalidInputs(f"input must be (B, C, H, W), not of {input.dim()} dimensions")
    channels = input.shape[1]
    if num_groups < 1 or channels % num_groups:
        raise InvalidInputs(f"{channels} channels do not divide into {num_groups} groups")
    if (weight is None) != (bias is None):
        raise InvalidInputs("weight and bias come together or not at all")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.shape != (channels,):
            raise InvalidInputs(f"{name} must have {channels} elements, one a channel")
    if op not in (None, "triton", "reference"):
        raise InvalidInputs(f"op must be 'triton', 'reference' or None, not {op!r}")
    input = _rows_last(input)
    if input.numel() == 0:
        return input.clone()
    height, width = input.shape[2:]
    moments = GroupMoments(input, [height * width], op)
    moments.store(0, input)
    moments.settle(num_groups, weight, bias, eps)
    return moments.normalized(input, 0, height, silu=silu)
