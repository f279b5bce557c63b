"""What a patched model says about itself: one `Layer` per attention module. Knows no host class."""

from dataclasses import dataclass

__all__ = ["NOT_RECORDED", "NOT_RUN", "UNCHANGED", "Layer"]

NOT_RECORDED = "not recorded"
NOT_RUN = "not run yet"
UNCHANGED = "unchanged"


@dataclass(frozen=True, slots=True)
class Layer:
    """One attention layer of a pipeline or model.

    Args:
        path: where it sits, e.g. `unet.mid_block.attentions.0.transformer_blocks.0.attn1`.
        requested: the `attention_op` asked for, "auto", or "unchanged" for a layer left alone.
        running: the implementation that the last call ran, recorded when it was dispatched;
            "not run yet" before the first call; "not recorded" inside compiled code; the host's
            own class for a layer left alone.
        reason: why that one runs: what every other candidate was refused for, or why the layer
            was left alone.
    """

    path: str
    requested: str
    running: str
    reason: str

    @property
    def patched(self) -> bool:
        """Whether our attention serves this layer."""
        return self.requested != UNCHANGED
