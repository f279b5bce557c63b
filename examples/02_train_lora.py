"""Train a LoRA for a few steps through sdx_accel's attention, and print how far the loss fell.

Runs offline: without `--model` the UNet is a tiny SDXL with seeded random weights. The data are one
seeded random latent at one time step; put your own in their place. With a model of yours:

    python examples/02_train_lora.py --model stabilityai/stable-diffusion-xl-base-1.0
"""

import argparse
from pathlib import Path

import torch
from diffusers import DDPMScheduler
from peft import LoraConfig, get_peft_model_state_dict

import sdx_accel  # noqa: F401  (attaches enable_xattn)
from sdx_accel.runtime.checkpoints import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="random:sdxl-tiny", help="folder, checkpoint or hub id")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path("outputs/lora"))
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    pipe = load(options.model, dtype="fp32").to(device)
    unet, schedule = pipe.unet, DDPMScheduler.from_config(pipe.scheduler.config)
    with torch.no_grad():
        text, _, pooled, _ = pipe.encode_prompt("an apple", do_classifier_free_guidance=False)
    side = unet.config.sample_size
    pixels = side * pipe.vae_scale_factor
    sizes = torch.tensor([[pixels, pixels, 0, 0, pixels, pixels]])
    added = {"text_embeds": pooled, "time_ids": sizes.to(device)}
    torch.manual_seed(0)
    latent, noise = torch.randn(2, 1, unet.config.in_channels, side, side).to(device)
    noisy = schedule.add_noise(latent, noise, time := torch.tensor([500], device=device))

    unet.requires_grad_(False).train()
    unet.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    unet.enable_gradient_checkpointing()
    unet.enable_xattn()  # in any order with the two calls above
    optimizer = torch.optim.AdamW((p for p in unet.parameters() if p.requires_grad), lr=1e-2)

    for step in range(1, options.steps + 1):
        with torch.autocast(device, torch.bfloat16):
            predicted = unet(noisy, time, text, added_cond_kwargs=added).sample
        loss = torch.nn.functional.mse_loss(predicted.float(), noise)
        loss.backward()
        optimizer.step()
        unet.zero_grad()
        if step in (1, options.steps):
            print(f"step {step}: loss {loss.item():.4f}")
    pipe.save_lora_weights(options.output, get_peft_model_state_dict(unet))
    print(options.output)


if __name__ == "__main__":
    main()
