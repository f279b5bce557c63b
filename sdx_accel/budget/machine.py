"""The card as the planner sees it: a few numbers and where they came from."""

from dataclasses import asdict, dataclass
from typing import Any

from sdx_accel.budget.units import GIB, MIB

__all__ = ["Machine"]


@dataclass(frozen=True)
class Machine:
    """One GPU.

    Args:
        name: what the driver calls it.
        total_bytes: size of its memory, None when unknown.
        free_bytes: what this process may use at most (driver's free plus already ours), or None.
        non_torch_bytes: driver-visible use that torch's allocator does not own: CUDA context,
            cuDNN and cuBLAS code, Triton modules.
        link_bytes_per_s: host to device copies from pinned memory.
        blas_workspace_bytes: what torch allocates once for cuBLAS.
        source: "generic" for the built-in record, "measured" for a reading.
        flops_per_s: half-precision operations a second of a UNet step launched op by op.
        pageable_bytes_per_s: host to device copies from memory that is not pinned.
        pinnable_bytes: host memory that may be pinned, None when unknown.
        ram_bytes: host memory that weights may take, None when not limited.
        history: digest of the measured peaks that the plan was raised by, "" for none.
    """

    name: str
    total_bytes: int | None
    free_bytes: int | None
    non_torch_bytes: int
    link_bytes_per_s: float
    blas_workspace_bytes: int
    source: str
    flops_per_s: float = 25e12
    pageable_bytes_per_s: float = 3e9
    pinnable_bytes: int | None = None
    ram_bytes: int | None = None
    history: str = ""

    @classmethod
    def generic(cls) -> "Machine":
        """The record used where no GPU can be read.

        0.60 GiB is the context measured on an H200 with CUDA 13; 12 GB/s is a PCIe 4.0 ×8 link,
        what an 8 GB card has; 8.1 MiB is torch's default cuBLAS workspace below sm_90. 25 TFLOP/s
        is the tensor rate of an RTX 3060 with sums in fp32, twice its 12.7 without tensor cores;
        3 GB/s from memory that is not pinned is what sglang#32032 reports (2.8).
        """
        return cls(
            name="generic",
            total_bytes=None,
            free_bytes=None,
            non_torch_bytes=round(0.60 * GIB),
            link_bytes_per_s=12e9,
            blas_workspace_bytes=round(8.125 * MIB),
            source="generic",
        )

    def __str__(self) -> str:
        context, link = self.non_torch_bytes / GIB, self.link_bytes_per_s / 1e9
        pace = self.flops_per_s / 1e12
        learned = f", learned peaks {self.history}" if self.history else ""
        return (
            f"{self.name} ({self.source}): context {context:.2f} GiB, link {link:.0f} GB/s, "
            f"{pace:.0f} TFLOP/s{learned}"
        )

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON-ready values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Machine":
        """Inverse of `to_dict`."""
        return cls(**values)
