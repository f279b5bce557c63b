"""UNet and both text encoders together: v-prediction on the latents of the trained VAE.

Of each sample: one of several captions, no caption at all for one in ten (guidance needs it), one
of a few crops (told to the UNet by SDXL's own crop conditioning, so that inference at crop 0, 0
gives whole pictures), and for one in ten another size than the true one in the conditioning, so
that the model does not mind being asked for other sizes.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from attention_choice import checked_samples, choose_attention, what_ran
from data import SIDE
from flat import FlatWeights
from model import SCHEDULER
from progress import Clock
from steps import run_for
from torch import Tensor, nn

__all__ = ["CROPS", "Material", "TextAndUNet", "train_unet"]

RATE = 1.5e-3
#: pixels that a training picture is moved up and left by; the first is by far the most frequent
CROPS = ((0, 0), (0, 6), (6, 0), (6, 6))
WHOLE, NO_CAPTION, OTHER_SIZE = 0.8, 0.1, 0.1


@dataclass(frozen=True)
class Material:
    """What the denoiser learns from.

    Attributes:
        latents: fp32 (N, crops, 4, 16, 16).
        tokens: int64 (N, captions, tokens) of the first tokenizer; the second pads with id 0.
        empty: int64 (tokens,), the caption "".
        table: int64 (entries,), pictures by how often they are to be drawn.
        corners: int64 (crops, 2), `CROPS` on the device.
    """

    latents: Tensor
    tokens: Tensor
    empty: Tensor
    table: Tensor
    corners: Tensor


class TextAndUNet(nn.Module):
    """The part of the pipeline that runs between tokens and the predicted velocity."""

    def __init__(self, text_encoder: Any, text_encoder_2: Any, unet: Any) -> None:
        super().__init__()
        self.text_encoder, self.text_encoder_2, self.unet = text_encoder, text_encoder_2, unet

    def enable_xattn(self, attention_op: Any = None) -> None:
        self.unet.enable_xattn(attention_op=attention_op)

    def encode(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Context (N, tokens, 192) and pooled text (N, 128), as SDXL's pipeline makes them."""
        end = tokens.amax(1, keepdim=True)
        # after the first end of text the second tokenizer pads with id 0
        padding = ((tokens == end).cumsum(1) > 1) & (tokens == end)
        length = tokens.shape[1]
        # a ready mask: transformers would build its own anew in each captured step
        causal = torch.ones(1, 1, length, length, dtype=torch.bool, device=tokens.device).tril()
        one = self.text_encoder(tokens, attention_mask=causal, output_hidden_states=True)
        two = self.text_encoder_2(
            tokens.masked_fill(padding, 0), attention_mask=causal, output_hidden_states=True
        )
        return torch.cat([one.hidden_states[-2], two.hidden_states[-2]], dim=-1), two.text_embeds

    def forward(
        self, noisy: Tensor, time: Tensor, tokens: Tensor, keep: Tensor, time_ids: Tensor
    ) -> Tensor:
        """Predicted velocity; `keep` is 0 where the text is to be all zeros, as for no prompt."""
        context, pooled = self.encode(tokens)
        keep = keep.to(context.dtype)[:, None]
        added = {"text_embeds": pooled * keep, "time_ids": time_ids.to(context.dtype)}
        return self.unet(noisy, time, context * keep[:, None], added_cond_kwargs=added).sample


def noise_levels(device: torch.device) -> tuple[Tensor, Tensor]:
    """Share of signal and of noise in amplitude at every timestep, fp32 (1000,)."""
    import diffusers

    kept = diffusers.DDPMScheduler.from_config(SCHEDULER).alphas_cumprod.to(device)
    return kept.sqrt(), (1.0 - kept).sqrt()


def draw(material: Material, batch: int, levels: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """One random batch: arguments of `TextAndUNet.forward`, and the target."""
    latents, device = material.latents, material.latents.device

    def rand() -> Tensor:
        return torch.rand(batch, device=device)

    def below(limit: int) -> Tensor:
        return torch.randint(limit, (batch,), device=device)

    picture = material.table[below(len(material.table))]
    crop = below(len(CROPS)).masked_fill(rand() < WHOLE, 0)
    clean = latents[picture, crop]
    tokens = material.tokens[picture, below(material.tokens.shape[1])]
    chance = rand()
    tokens = torch.where((chance < NO_CAPTION)[:, None], material.empty, tokens)
    # half of the samples without caption are what the pipeline makes of no negative prompt
    keep = (chance >= NO_CAPTION / 2).float()
    size = (64 + 8 * below(57)).masked_fill(rand() >= OTHER_SIZE, SIDE)
    down, right = material.corners[crop].unbind(1)
    time_ids = torch.stack([size, size, down, right, size, size], dim=1)
    time = below(len(levels[0]))
    signal, share = (level[time][:, None, None, None] for level in levels)
    noise = torch.randn_like(clean)
    return {
        "noisy": signal * clean + share * noise,
        "target": signal * noise - share * clean,
        "time": time,
        "tokens": tokens,
        "keep": keep,
        "time_ids": time_ids,
    }


def velocity_loss(model: Any, batch: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Mean squared error of the predicted velocity, fp32."""
    got = model(
        batch["noisy"].to(dtype), batch["time"], batch["tokens"], batch["keep"], batch["time_ids"]
    )
    return F.mse_loss(got.float(), batch["target"])


def train_unet(
    parts: dict[str, Any],
    material: Material,
    seconds: float,
    clock: Clock,
    *,
    batch: int,
    dtype: torch.dtype,
    attention: str,
    save: Callable[[dict[str, Any], FlatWeights], None],
    every: float,
    most_steps: int | None = None,
    resume: Tensor | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train UNet and text encoders.

    Args:
        parts: "text_encoder", "text_encoder_2", "unet", fp32, on the device of the material.
        seconds: for everything here but the last `save`, the check of attention included.
        save: called now and then with modules that hold the mean weights, and the flat weights.
        resume: the flat master weights of an earlier run, whose mean weights `parts` hold.

    Returns:
        What the report should hold, and the modules with the mean weights in fp32.
    """
    end = clock.passed() + seconds
    device = material.latents.device
    model = TextAndUNet(parts["text_encoder"], parts["text_encoder_2"], parts["unet"])
    levels = noise_levels(device)
    few = draw(material, checked_samples(device), levels)
    spare = copy.deepcopy(model)  # will hold the mean weights
    record: dict[str, Any] = {
        "attention": choose_attention(
            model, attention, lambda copied, kind: velocity_loss(copied, few, kind), dtype, clock
        )
    }
    flat = FlatWeights([model], dtype)
    if resume is not None:
        flat.resume(resume)
    running = torch.zeros((), device=device)

    def step() -> None:
        loss = velocity_loss(model, draw(material, batch, levels), dtype)
        loss.backward()
        flat.step()
        running.copy_(torch.where(running == 0, loss.detach(), running.lerp(loss.detach(), 0.01)))

    def mean_parts() -> dict[str, Any]:
        for p, weight in zip(spare.parameters(), flat.views(flat.mean), strict=True):
            p.data.copy_(weight)
        return {name: getattr(spare, name) for name in parts}

    rate = RATE * (0.5 if resume is not None else 1.0)
    try:
        record |= run_for(
            end - clock.passed(),
            step,
            flat.rate,
            rate,
            running,
            device,
            clock,
            most_steps=most_steps,
            every=every,
            save=lambda: save(mean_parts(), flat),
        )
    except Exception as error:  # what has been learnt until now is still there
        record["ended_by"] = f"{type(error).__name__}: {error}"[:500]
        clock.say(f"training ended by {record['ended_by']}")
    record["layers"] = what_ran(model.unet)
    record["parameters"] = len(flat.master)
    learnt = mean_parts()
    save(learnt, flat)
    return record, learnt
