"""All weights of some modules in one tensor, with Adam and a running mean of the weights on it.

A step of a small model is hundreds of tiny kernels; with one flat tensor the optimizer is ten, and
all of it can be captured in a CUDA graph. Modules compute in 16 bits (or in fp32 on a CPU); the
master weights, Adam's moments and the mean stay in fp32.
"""

import torch
from torch import Tensor, nn

__all__ = ["FlatWeights"]

#: elements; weights begin at multiples of 128 bytes in 16 bits, or matrix products take slow paths
ALIGNED = 64


class FlatWeights:
    """Trainable weights of `modules`, which from now on are views of one tensor.

    Attributes:
        master: fp32 weights, flat.
        mean: fp32 exponential moving average of `master`.
        rate: the learning rate, a tensor, so that a captured step can follow it.
    """

    def __init__(
        self,
        modules: list[nn.Module],
        dtype: torch.dtype,
        *,
        decay: float = 0.9995,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.01,
        clip: float = 1.0,
    ) -> None:
        self.parameters = [p for module in modules for p in module.parameters()]
        device = self.parameters[0].device
        self.sizes = [-(-p.numel() // ALIGNED) * ALIGNED for p in self.parameters]
        self.master = torch.zeros(sum(self.sizes), device=device)
        for p, part in zip(self.parameters, self.views(self.master), strict=True):
            part.copy_(p.detach())
        self.mean = self.master.clone()
        self.first, self.second = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.weights, self.grads = self.master.to(dtype), torch.zeros_like(self.master, dtype=dtype)
        self.rate = torch.zeros((), device=device)
        self.count = torch.zeros((), device=device)
        self.norm = torch.zeros((), device=device)
        self.decay, self.betas, self.clip = decay, betas, clip
        # matrices and kernels only: a norm's weight or a bias has no reason to shrink
        self.shrink = torch.zeros_like(self.master)
        for p, part in zip(self.parameters, self.views(self.shrink), strict=True):
            part.fill_(weight_decay if p.ndim > 1 else 0.0)
        for p, weight, grad in zip(
            self.parameters, self.views(self.weights), self.views(self.grads), strict=True
        ):
            p.data = weight
            p.grad = grad

    def views(self, flat: Tensor) -> list[Tensor]:
        """Parts of a flat tensor in the shapes of the parameters."""
        parts = zip(flat.split(self.sizes), self.parameters, strict=True)
        return [part[: p.numel()].view(p.shape) for part, p in parts]

    @torch.no_grad()
    def step(self) -> None:
        """One AdamW step from `grads`, which become 0; then the mean follows."""
        grads = self.grads.float()
        torch.linalg.vector_norm(grads, out=self.norm)
        # a gradient that is not finite would stay in the moments for ever: skip it
        fine = torch.isfinite(self.norm)
        factor = (self.clip / (self.norm + 1e-6)).clamp_max(1.0)
        grads = torch.where(fine, grads * factor, torch.zeros_like(grads))
        self.count.add_(1.0)
        one, two = self.betas
        self.first.lerp_(grads, 1.0 - one)
        self.second.lerp_(grads * grads, 1.0 - two)
        first = self.first / (1.0 - one**self.count)
        second = self.second / (1.0 - two**self.count)
        update = first / (second.sqrt() + 1e-8) + self.shrink * self.master
        self.master.sub_(update * self.rate)
        self.weights.copy_(self.master)
        # young means forget fast, or the random start would stay in them
        keep = ((1.0 + self.count) / (10.0 + self.count)).clamp_max(self.decay)
        self.mean.add_((self.master - self.mean) * (1.0 - keep))
        self.grads.zero_()

    @torch.no_grad()
    def resume(self, master: Tensor) -> None:
        """Go on from another run's `master`; the modules' present weights stay the mean.

        Adam's moments are found again in a few hundred steps; the count keeps the mean slow.
        """
        self.master.copy_(master)
        self.weights.copy_(master)
        self.count.fill_(1000.0)
