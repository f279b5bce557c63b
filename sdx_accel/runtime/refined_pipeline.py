"""SDXL and its refiner as one pipeline, so that one plan and one budget hold both UNets.

Knows diffusers' two pipelines by their public calls and leaves every computation to them.
"""

from collections.abc import Callable
from typing import Any

import torch
from diffusers import StableDiffusionXLImg2ImgPipeline, StableDiffusionXLPipeline

__all__ = ["StableDiffusionXLRefinedPipeline"]

_Callback = Callable[[Any, int, Any, dict[str, Any]], dict[str, Any]]


class StableDiffusionXLRefinedPipeline(StableDiffusionXLPipeline):
    """SDXL for the first part of the noise, the refiner for the rest.

    The refiner shares the second text encoder and the VAE of its base, whose prompt it reads again:
    both texts are encoded before the first step, so that text encoders are needed only once.

    Args:
        refiner: the refiner's UNet; the other models are the base's.
        requires_aesthetics_score: whether the refiner is told how pleasing its picture shall be.
        refiner_force_zeros: whether it takes zeros for an absent negative prompt.
    """

    def __init__(
        self,
        vae: Any,
        text_encoder: Any,
        text_encoder_2: Any,
        tokenizer: Any,
        tokenizer_2: Any,
        unet: Any,
        scheduler: Any,
        refiner: Any,
        image_encoder: Any = None,
        feature_extractor: Any = None,
        force_zeros_for_empty_prompt: bool = True,
        add_watermarker: bool | None = None,
        requires_aesthetics_score: bool = True,
        refiner_force_zeros: bool = False,
    ) -> None:
        super().__init__(
            vae,
            text_encoder,
            text_encoder_2,
            tokenizer,
            tokenizer_2,
            unet,
            scheduler,
            image_encoder,
            feature_extractor,
            force_zeros_for_empty_prompt,
            add_watermarker,
        )
        self.register_modules(refiner=refiner)
        self.register_to_config(
            requires_aesthetics_score=requires_aesthetics_score,
            refiner_force_zeros=refiner_force_zeros,
        )

    # diffusers' own pipelines have this; the refiner's texts are encoded here, outside of them
    @torch.no_grad()
    def __call__(
        self,
        prompt: Any = None,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int = 50,
        guidance_scale: float = 5.0,
        negative_prompt: Any = None,
        num_images_per_prompt: int = 1,
        generator: Any = None,
        refiner_start: float = 0.8,
        callback_on_step_end: _Callback | None = None,
        output_type: str = "pil",
        **base: Any,
    ) -> Any:
        """Make pictures.

        Args:
            prompt: one text or a list, for both UNets.
            height, width: pixels; the base's own size by default.
            num_inference_steps: of both together.
            guidance_scale: of both; 1 or less means none.
            negative_prompt: for both.
            num_images_per_prompt: pictures of each prompt, at once.
            generator: draws the noise, once.
            refiner_start: how much of the noise the base removes, above 0 and below 1.
            callback_on_step_end: as diffusers calls it, with the step counted over both.
            output_type: as diffusers' pipelines have it.
            base: more arguments for the base alone, such as an IP-Adapter's picture.

        Returns:
            What `StableDiffusionXLImg2ImgPipeline` returns.
        """
        done = 0

        def count(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
            nonlocal done
            done += 1
            # the stages know their own length only
            self._num_timesteps = num_inference_steps
            return values if callback is None else callback(self, done - 1, timestep, values)

        callback = callback_on_step_end
        second = self._second()
        texts = second.encode_prompt(
            prompt,
            num_images_per_prompt=num_images_per_prompt,
            do_classifier_free_guidance=guidance_scale > 1,
            negative_prompt=negative_prompt,
            device=self._execution_device,
        )
        latents = (
            super()
            .__call__(
                prompt=prompt,
                height=height,
                width=width,
                num_inference_steps=num_inference_steps,
                guidance_scale=guidance_scale,
                negative_prompt=negative_prompt,
                num_images_per_prompt=num_images_per_prompt,
                generator=generator,
                denoising_end=refiner_start,
                callback_on_step_end=count,
                output_type="latent",
                **base,
            )
            .images
        )
        embeds, negative, pooled, negative_pooled = texts
        return second(
            image=latents,
            prompt_embeds=embeds,
            negative_prompt_embeds=negative,
            pooled_prompt_embeds=pooled,
            negative_pooled_prompt_embeds=negative_pooled,
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            generator=generator,
            denoising_start=refiner_start,
            callback_on_step_end=count,
            output_type=output_type,
        )

    def _second(self) -> StableDiffusionXLImg2ImgPipeline:
        """The refiner's own pipeline around the shared models."""
        second = StableDiffusionXLImg2ImgPipeline(
            vae=self.vae,
            text_encoder=None,
            text_encoder_2=self.text_encoder_2,
            tokenizer=None,
            tokenizer_2=self.tokenizer_2,
            unet=self.refiner,
            # each stage counts its own steps
            scheduler=type(self.scheduler).from_config(self.scheduler.config),
            requires_aesthetics_score=self.config.requires_aesthetics_score,
            force_zeros_for_empty_prompt=self.config.refiner_force_zeros,
            add_watermarker=False,
        )
        second.set_progress_bar_config(**getattr(self, "_progress_bar_config", {}))
        return second
