"""What `xattn_report()` gives: layers, phases, the plan, repeated calls, and how a VAE works.

It knows how each is printed; it looks at no model.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import sdx_patches
from sdx_accel.budget.plan import Plan
from sdx_accel.errors import RefusedError
from sdx_accel.runtime.enforce import PhaseRecord
from sdx_accel.runtime.plot import plot_plan
from sdx_accel.runtime.recovery import Retry
from sdx_kernels.tuning.measured_order import in_use

__all__ = ["Report"]


@dataclass(frozen=True)
class Report:
    """What runs and what it took; prints as a table.

    Args:
        layers: per attention layer: path, requested, running, reason.
        phases: per phase: predicted and measured peak in GiB.
        plan: the plan that is being held, or None.
        retries: calls of the newest picture that ran again after memory was refused.
        fused: by component, how each autoencoder decodes and encodes, and why.
        orders: (card, digest) of each order of attention that `bench --tune` measured here.
    """

    layers: tuple[sdx_patches.Layer, ...]
    phases: tuple[PhaseRecord, ...]
    plan: Plan | None
    retries: tuple[Retry, ...] = ()
    fused: Mapping[str, str] = field(default_factory=dict)
    orders: tuple[tuple[str, str], ...] = field(default_factory=in_use)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready values."""
        return {
            "layers": [asdict(layer) for layer in self.layers],
            "phases": [asdict(phase) for phase in self.phases],
            "plan": None if self.plan is None else self.plan.to_dict(),
            "retries": [asdict(retry) for retry in self.retries],
            "fused": dict(self.fused),
            "orders": [{"card": card, "digest": digest} for card, digest in self.orders],
        }

    def to_json(self) -> str:
        """The report as JSON text."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the plan that is being held and what its phases took; replaces an older drawing.

        Args:
            path: a file name that ends in .png, .svg or .pdf.

        Raises:
            RefusedError: no plan is held, matplotlib is missing, or the file cannot be written.
        """
        if self.plan is None:
            raise RefusedError("there is no plan to draw: call pipe.enable_xattn(vram=…) first")
        plot_plan(self.plan, Path(path), self.phases)

    def __str__(self) -> str:
        groups: dict[tuple[str, str, str, str], int] = {}
        for layer in self.layers:
            key = (layer.path.split(".")[0], layer.requested, layer.running, layer.reason)
            groups[key] = groups.get(key, 0) + 1
        lines = [
            f"{where}: {n} layer{'s' if n > 1 else ''}, requested {requested}, running {running}"
            + (f" ({reason})" if reason else "")
            for (where, requested, running, reason), n in groups.items()
        ]
        lines += [
            f"{name or 'this'} decodes and encodes: {how}" for name, how in self.fused.items()
        ]
        lines += [str(phase) for phase in self.phases]
        lines += [str(retry) for retry in self.retries]
        if lines:
            lines += [
                f"attention's order was measured on this {card} by bench --tune (digest {digest})"
                for card, digest in self.orders
            ]
        return "\n".join(lines) if lines else "sdx_accel is not enabled here"
