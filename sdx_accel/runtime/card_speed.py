"""Times copies and arithmetic on a CUDA card, for `calibration`."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from sdx_accel.runtime.calibration import steady_seconds

__all__ = ["CudaMeasure"]


class CudaMeasure:
    """Readings of one card.

    Args:
        device: torch's name for it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def copy(self, n_bytes: int, *, pinned: bool, busy: bool) -> float:
        """Seconds of one host to device copy of `n_bytes`."""
        source = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=pinned)
        target = torch.empty(n_bytes, dtype=torch.uint8, device=self.device)
        # written once before: untouched pages all are the same page of zeros
        source.fill_(1)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self.device)
        if busy:
            self._keep_busy()
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            began = time.perf_counter()
            start.record()
            target.copy_(source, non_blocking=pinned)
            end.record()
        end.synchronize()
        host = time.perf_counter() - began
        torch.cuda.synchronize(self.device)
        # a pageable copy is staged by the host: its clock counts
        return start.elapsed_time(end) / 1e3 if pinned else host

    def _keep_busy(self) -> None:
        """Matrix products on the current stream that outlast a copy of 32 MiB."""
        square = torch.zeros(4096, 4096, device=self.device, dtype=torch.float16)
        # 137 GFLOP each: 1.4 ms at 800 TFLOP/s, where the copy takes 0.6 at 55 GB/s
        for _ in range(8):
            torch.mm(square, square)

    def work(self, kind: str) -> tuple[float, float]:
        """(operations, seconds) of one kind of work, see `calibration.SHARES`."""
        # random operands and weights must not move the generators that pictures are drawn from
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            done, call = getattr(self, f"_{kind}")()
            # the first one loads libraries and picks algorithms
            call()
            taken = steady_seconds(partial(self._window, call))
        # it holds the operands
        del call
        torch.cuda.empty_cache()
        return done, taken

    def _window(self, call: Callable[[], Any], calls: int) -> float:
        """Seconds of `calls` calls; by the card's clock, since the host's counts the way there."""
        if self.device.type != "cuda":
            began = time.perf_counter()
            for _ in range(calls):
                call()
            return time.perf_counter() - began
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self.device)
        with torch.cuda.device(self.device):
            start.record()
            for _ in range(calls):
                call()
            end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=torch.float16)

    def _matmul(self) -> tuple[float, Callable[[], Any]]:
        """The feed-forward's second matrix at 32² latents, two predictions: 2048 rows."""
        rows, weight = self._random(2048, 5120), self._random(1280, 5120)
        return 2.0 * 2048 * 5120 * 1280, lambda: torch.nn.functional.linear(rows, weight)

    def _convolution(self) -> tuple[float, Callable[[], Any]]:
        """320 to 320 channels at 128² latents, two predictions."""
        picture, kernel = self._random(2, 320, 128, 128), self._random(320, 320, 3, 3)
        return 2.0 * 2 * 128 * 128 * 320 * 320 * 9, lambda: torch.nn.functional.conv2d(
            picture, kernel, padding=1
        )

    def _attention(self) -> tuple[float, Callable[[], Any]]:
        """10 heads of 64 over 4096 positions, two predictions."""
        heads = self._random(2, 10, 4096, 64)
        return (
            4.0 * 2 * 10 * 4096 * 4096 * 64,
            lambda: torch.nn.functional.scaled_dot_product_attention(heads, heads, heads),
        )

    def _block(self) -> tuple[float, Callable[[], Any]]:
        """SDXL's commonest block, 60 of its 70: 1280 wide, 1024 positions, 77 of text."""
        from diffusers.models.attention import BasicTransformerBlock

        block = BasicTransformerBlock(1280, 20, 64, cross_attention_dim=2048)
        block = block.to(self.device, torch.float16)
        states, text = self._random(2, 1024, 1280), self._random(2, 77, 2048)
        rows, words, width = 2 * 1024, 2 * 77, 1280
        # six square matrices, two of the text, the gated feed-forward, two attentions
        linear = 6 * rows * width * width + 2 * words * 2048 * width + 12 * rows * width * width
        attention = 2 * (rows * 1024 * width + rows * 77 * width)
        return 2.0 * linear + 2.0 * attention, lambda: block(states, encoder_hidden_states=text)
