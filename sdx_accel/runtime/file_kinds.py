"""What a weights file seems to be, from the names of its tensors, and the flag that takes it.

Knows names as the public files have them; opens nothing.
"""

from collections.abc import Collection

__all__ = ["WHOLE_MODEL", "seems_to_be"]

WHOLE_MODEL = "a whole model: give it with --model"

_UNET = "model.diffusion_model."
_LORA = "a LoRA: give it with --lora"
# first match decides; prefixes of tensor names
_KINDS = (
    ("an IP-Adapter: give it with --ip-adapter", ("ip_adapter.", "image_proj.")),
    (_LORA, ("lora_unet_", "lora_te", "unet.", "text_encoder.")),
    (
        "a ControlNet: give its diffusers folder with --controlnet",
        ("control_model.", "controlnet_"),
    ),
    ("a Flux model; use its diffusers folder", ("double_blocks.", f"{_UNET}double_blocks.")),
    ("an SD 3 model; use its diffusers folder", ("joint_blocks.", f"{_UNET}joint_blocks.")),
    ("an SD 2 model; use its diffusers folder", ("cond_stage_model.model.",)),
    ("an SDXL refiner; use its diffusers folder", ("conditioner.embedders.0.model.",)),
)
_PARTS = (
    ("a UNet alone, not a whole model", ("down_blocks.", _UNET)),
    ("a VAE alone, not a whole model", ("first_stage_model.", "encoder.", "decoder.")),
    (
        "a textual inversion: give it with --embedding",
        ("emb_params", "string_to_param", "clip_l", "clip_g"),
    ),
)
_LORA_PARTS = (".lora_A", ".lora_B", ".lora_down", ".lora_up", ".lora.down", ".lora.up")


def seems_to_be(names: Collection[str]) -> str | None:
    """What a file with tensors of these names is, with the flag that takes it; None = unknown.

    Args:
        names: of all tensors in the file.
    """

    def has(*prefixes: str) -> bool:
        return any(name.startswith(prefixes) for name in names)

    if any(part in name for name in names for part in _LORA_PARTS):
        return _LORA
    known = next((what for what, prefixes in _KINDS if has(*prefixes)), None)
    if known is None and has(_UNET) and has("first_stage_model."):
        return WHOLE_MODEL
    parts = (what for what, prefixes in _PARTS if has(*prefixes))
    return known or next(parts, None)
