"""The VAE: 128 × 128 pictures to 4 × 16 × 16 latents of mean 0 and deviation 1, and back.

Losses: L1 in three sizes, L1 of the Sobel gradients (flat pictures are all edges), a little squared
error, and a KL term whose noise makes the decoder forgive small errors of the denoiser.
"""

from typing import Any

import torch
import torch.nn.functional as F
from attention_choice import checked_samples, choose_attention, what_ran
from flat import FlatWeights
from progress import Clock
from steps import run_for
from torch import Tensor

__all__ = ["encode", "normalise", "psnr", "to_unit", "train_vae"]

RATE, KL = 1e-3, 5e-4
SHIFT = 8  # pixels


def to_unit(pixels: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 (N, H, W, 3) to −1…1, (N, 3, H, W)."""
    return (pixels.permute(0, 3, 1, 2).float() / 127.5 - 1.0).to(dtype)


def draw_pictures(pixels: Tensor, batch: int) -> Tensor:
    """Random pictures, flipped, shifted and with swapped colour channels, uint8 (batch, H, W, 3).

    Colours are swapped because the denoiser also learns pictures in colours that were not drawn.
    """
    device, side = pixels.device, pixels.shape[1]
    index = torch.randint(len(pixels), (batch, 1, 1), device=device)
    line = torch.arange(side, device=device)
    shift = torch.randint(-SHIFT, SHIFT + 1, (2, batch, 1), device=device)
    chance = torch.rand(2, batch, 1, device=device)
    flip = torch.stack([chance[0] < 0.1, chance[1] < 0.3])
    # edges are repeated, and they are white
    lines = (torch.where(flip, side - 1 - line, line) + shift).clamp(0, side - 1)
    found = pixels[index, lines[0].unsqueeze(2), lines[1].unsqueeze(1)]
    swap = torch.rand(batch, 3, device=device).argsort(1)
    keep = torch.rand(batch, 1, device=device) < 0.7
    swap = torch.where(keep, torch.arange(3, device=device), swap)
    return found.gather(3, swap[:, None, None].expand_as(found))


def _sobel(picture: Tensor, kernels: Tensor) -> Tensor:
    return F.conv2d(picture.flatten(0, 1).unsqueeze(1), kernels)


def reconstruction_loss(got: Tensor, wanted: Tensor, kernels: Tensor) -> Tensor:
    """Losses of pictures, in fp32; `kernels` is (2, 1, 3, 3)."""
    got, wanted = got.float(), wanted.float()
    difference = got - wanted
    loss = difference.abs().mean() + 0.5 * difference.square().mean()
    # the gradient of a difference is the difference of the gradients
    loss = loss + 0.5 * _sobel(difference, kernels).abs().mean()
    for size in (2, 4):
        loss = loss + 0.25 * F.avg_pool2d(difference, size).abs().mean()
    return loss


def sobel_kernels(device: torch.device) -> Tensor:
    across = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]]) / 8.0
    return torch.stack([across, across.T]).unsqueeze(1).to(device)


def vae_loss(vae: Any, picture: Tensor, noise: Tensor, kernels: Tensor) -> Tensor:
    """Loss of pictures (N, 3, H, W) in −1…1 with fixed noise of the latents' shape."""
    mean, logvar = vae.quant_conv(vae.encoder(picture)).chunk(2, dim=1)
    mean, logvar = mean.float(), logvar.float().clamp(-20.0, 10.0)
    latent = (mean + (0.5 * logvar).exp() * noise).to(picture.dtype)
    got = vae.decoder(vae.post_quant_conv(latent))
    kl = 0.5 * (mean.square() + logvar.exp() - 1.0 - logvar).mean()
    return reconstruction_loss(got, picture, kernels) + KL * kl


def train_vae(
    vae: Any,
    pixels: Tensor,
    seconds: float,
    clock: Clock,
    *,
    batch: int,
    dtype: torch.dtype,
    attention: str,
    most_steps: int | None = None,
    resumed: bool = False,
) -> dict[str, Any]:
    """Train in place; afterwards the modules hold the mean weights, with normalised latents.

    Args:
        vae: on the device of `pixels`, fp32; `dtype` afterwards.
        pixels: uint8 (N, H, W, 3).
        seconds: for everything here, the check of attention included.
    """
    end = clock.passed() + seconds
    device, side = pixels.device, pixels.shape[1] // 8
    kernels = sobel_kernels(device)
    few = pixels[:: len(pixels) // checked_samples(device)][: checked_samples(device)]
    noise = torch.randn(len(few), 4, side, side, device=device)
    record = {
        "attention": choose_attention(
            vae,
            attention,
            lambda model, kind: vae_loss(model, to_unit(few, kind), noise, kernels),
            dtype,
            clock,
        )
    }
    flat = FlatWeights([vae], dtype, decay=0.999)
    running = torch.zeros((), device=device)

    def step() -> None:
        picture = to_unit(draw_pictures(pixels, batch), dtype)
        noise = torch.randn(batch, 4, side, side, device=device)
        loss = vae_loss(vae, picture, noise, kernels)
        loss.backward()
        flat.step()
        running.copy_(torch.where(running == 0, loss.detach(), running.lerp(loss.detach(), 0.02)))

    rate = RATE * (0.3 if resumed else 1.0)
    seconds = end - clock.passed()
    record |= run_for(seconds, step, flat.rate, rate, running, device, clock, most_steps=most_steps)
    record["layers"] = what_ran(vae)
    for p, weight in zip(flat.parameters, flat.views(flat.mean), strict=True):
        p.grad, p.data = None, weight.clone()  # fp32 again
    return record


@torch.no_grad()
def encode(vae: Any, pixels: Tensor, batch: int = 256) -> Tensor:
    """Mean latents times the scaling factor, fp32 (N, 4, H/8, W/8)."""
    dtype = next(vae.parameters()).dtype
    means = [
        vae.encode(to_unit(part, dtype)).latent_dist.mean.float() for part in pixels.split(batch)
    ]
    return torch.cat(means) * vae.config.scaling_factor


@torch.no_grad()
def normalise(vae: Any, pixels: Tensor) -> dict[str, Any]:
    """Give each latent channel mean 0 and deviation 1, by the 1 × 1 convolutions beside it.

    The pictures stay the same: what the last encoder layer is divided by, the first decoder layer
    is multiplied with. So `scaling_factor` is 1, and nothing else needs to know.
    """
    latents = encode(vae, pixels)
    means, deviations = latents.mean((0, 2, 3)), latents.std((0, 2, 3))
    into, out = vae.quant_conv, vae.post_quant_conv
    count = len(means)
    out.bias.add_(out.weight[:, :, 0, 0] @ means)
    out.weight.mul_(deviations[None, :, None, None])
    into.weight[:count].div_(deviations[:, None, None, None])
    into.bias[:count].sub_(means).div_(deviations)
    into.bias[count:].sub_(2.0 * deviations.log())
    return {"channel_means": means.tolist(), "channel_deviations": deviations.tolist()}


@torch.no_grad()
def psnr(vae: Any, pixels: Tensor, batch: int = 128) -> dict[str, float]:
    """How well pictures survive encoding and decoding, and the largest activation on the way."""
    dtype = next(vae.parameters()).dtype
    largest = torch.zeros((), device=pixels.device)

    def watch(module: Any, arguments: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            torch.maximum(largest, output.abs().amax().float(), out=largest)

    hooks = [module.register_forward_hook(watch) for module in vae.modules()]
    try:
        errors = []
        for part in pixels.split(batch):
            latent = vae.encode(to_unit(part, dtype)).latent_dist.mean
            got = vae.decode(latent).sample.float().clamp(-1.0, 1.0)
            errors.append((got - to_unit(part, torch.float32)).square().mean((1, 2, 3)) / 4.0)
        error = torch.cat(errors)
    finally:
        for hook in hooks:
            hook.remove()
    each = -10.0 * error.clamp_min(1e-10).log10()
    return {
        "psnr_db": -10.0 * error.mean().log10().item(),
        "psnr_mean_of_pictures_db": each.mean().item(),
        "psnr_worst_db": each.min().item(),
        "largest_activation": largest.item(),
    }
