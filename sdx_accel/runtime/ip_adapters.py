"""IP-Adapters (pictures as prompts): described, checked against the UNet, and loaded.

A .safetensors file with its image encoder found where diffusers looks for it, or
`random:ip-adapter`: seeded random weights that fit the model at hand. FaceID kinds, which need a
face recogniser of their own, are refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sdx_accel.errors import CheckpointError, RefusedError
from sdx_accel.runtime.adapter_twins import PLUS, STANDARD, ip_adapter_entry
from sdx_accel.runtime.architectures import is_random_spec
from sdx_accel.runtime.checkpoint_files import PICKLE_SUFFIXES, neighbours, read_header, read_json
from sdx_accel.runtime.checkpoint_folders import find_weights
from sdx_accel.runtime.descriptions import ComponentDescription, ModelDescription
from sdx_accel.runtime.file_kinds import seems_to_be
from sdx_accel.runtime.folder_loading import first_line, load_module, quiet_libraries
from sdx_accel.runtime.meta_models import public_config
from sdx_accel.runtime.phase_calls import twin
from sdx_accel.runtime.random_models import build_random_component, draw_weights

__all__ = ["RANDOM_IP_ADAPTER", "adapter_file", "load_ip_adapters", "with_ip_adapters"]

RANDOM_IP_ADAPTER = "random:ip-adapter"
_ENCODER = "CLIPVisionModelWithProjection"
# the image encoders that the public adapters were trained with: OpenCLIP's ViT-bigG/14 for SDXL,
# ViT-H/14 for SD 1.5; figures of their published config.json
_VIT = {"image_size": 224, "patch_size": 14, "hidden_act": "gelu", "num_attention_heads": 16}
_VIT_BIG_G = {
    **_VIT,
    "hidden_size": 1664,
    "intermediate_size": 8192,
    "num_hidden_layers": 48,
    "projection_dim": 1280,
}
_VIT_H = {
    **_VIT,
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "projection_dim": 1024,
}
_VIT_TINY = {
    **_VIT,
    "image_size": 56,
    "num_attention_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "projection_dim": 64,
}
# the first width of a real UNet; the tiny models are narrower
_REAL_WIDTH = 320
_TOKENS = 4

_Shapes = dict[str, tuple[int, ...]]


def with_ip_adapters(description: ModelDescription, sources: Sequence[str]) -> ModelDescription:
    """The description of a model with IP-Adapters on its UNet and their image encoder.

    Args:
        description: the model's.
        sources: .safetensors files, folders with one, or `random:ip-adapter`.

    Raises:
        RefusedError: the model takes no IP-Adapter.
        CheckpointError: one is missing, broken, of a kind that is not built, or made for another
            model; or its image encoder is not there.
    """
    unet = description.components.get("unet")
    if unet is None or not description.pipeline_class.startswith("StableDiffusion"):
        raise RefusedError(
            "--ip-adapter works with Stable Diffusion 1.5, 2 and SDXL models; "
            f"{description.source} is a {description.pipeline_class}"
        )
    # what the files are, before what lies beside them
    shapes_of = {source: _shapes(source, description) for source in sources}
    kinds = {source: _projection(source, shapes) for source, shapes in shapes_of.items()}
    encoder, place = _find_encoder(sources[0], description)
    projections = []
    for source in sources:
        shapes, projection = shapes_of[source], kinds[source]
        _check_unet(source, shapes, projection, description)
        _check_encoder(source, projection, encoder, place)
        projections.append(projection)
    components = {
        **description.components,
        "unet": replace(unet, adapters=[*unet.adapters, ip_adapter_entry(projections)]),
        "image_encoder": encoder,
    }
    files = dict(description.weight_files)
    if place is not None:
        weights = find_weights(place, "transformers").files
        files["image_encoder"] = [(str(path), size) for path, size in weights]
    return replace(description, components=components, weight_files=files)


def load_ip_adapters(
    pipe: Any, adapters: Sequence[tuple[str, float]], description: ModelDescription
) -> None:
    """Put IP-Adapters and their image encoder onto a pipeline on the CPU.

    Args:
        pipe: a Stable Diffusion or SDXL pipeline.
        adapters: (source, scale); 1.0 follows the picture as strongly as the text.
        description: from `with_ip_adapters` with the same sources.

    Raises:
        CheckpointError: weights are missing or broken.
    """
    from transformers import CLIPImageProcessor

    dtype = pipe.unet.dtype
    if getattr(pipe, "image_encoder", None) is None:
        component = description.components["image_encoder"]
        _, place = _find_encoder(adapters[0][0], description)
        with quiet_libraries():
            encoder = (
                build_random_component(component, dtype)
                if place is None
                else load_module(
                    place,
                    "image_encoder",
                    "transformers",
                    _ENCODER,
                    find_weights(place, "transformers"),
                    dtype,
                )
            )
            side = component.config.get("image_size", 224)
            # as diffusers builds it: the shorter side becomes `side`, then the middle is cut out
            looker = CLIPImageProcessor(size=side, crop_size=side)
        pipe.register_modules(image_encoder=encoder, feature_extractor=looker)
    states = [_state(source, description) for source, _ in adapters]
    try:
        with quiet_libraries():
            pipe.load_ip_adapter(
                states, subfolder="", weight_name=[""] * len(states), image_encoder_folder=None
            )
    except (ValueError, KeyError, RuntimeError, TypeError) as error:
        names = ", ".join(source for source, _ in adapters)
        raise CheckpointError(
            f"--ip-adapter {names} cannot be loaded: {first_line(error)}"
        ) from error
    pipe.set_ip_adapter_scale([scale for _, scale in adapters])


def adapter_file(source: str) -> Path | None:
    """The one file that a source names, or None for `random:ip-adapter`.

    Raises:
        CheckpointError: missing, a pickle, or a folder without exactly one file.
    """
    if is_random_spec(source):
        if source != RANDOM_IP_ADAPTER:
            raise CheckpointError(
                f"no IP-Adapter named {source!r}; did you mean {RANDOM_IP_ADAPTER!r}? It takes "
                "its shape from the model"
            )
        return None
    path = Path(source).expanduser()
    if path.is_dir():
        found = sorted(path.glob("*.safetensors"))
        if len(found) != 1:
            raise CheckpointError(
                f"--ip-adapter {path} is a folder with {len(found)} .safetensors files; name one "
                f"file (it holds: {neighbours(path)})"
            )
        return found[0]
    if not path.exists():
        raise CheckpointError(
            f"--ip-adapter {path}: no such file; {path.parent} holds: {neighbours(path.parent)}. "
            "Adapters are fetched with, for instance, `hf download h94/IP-Adapter "
            "--include 'sdxl_models/*' --local-dir ip-adapter`"
        )
    if path.suffix.lower() in PICKLE_SUFFIXES:
        raise CheckpointError(
            f"--ip-adapter {path} is a pickle, which can run code while it loads; use the "
            ".safetensors version"
        )
    return path


def _shapes(source: str, description: ModelDescription) -> _Shapes:
    """Tensor name → shape, as the public files name them."""
    path = adapter_file(source)
    if path is not None:
        return {name: tensor.shape for name, tensor in read_header(path).tensors.items()}
    layers = _cross_attentions(description)
    context = layers[0][1]
    width = _random_encoder(description)["projection_dim"]
    shapes: _Shapes = {
        "image_proj.proj.weight": (_TOKENS * context, width),
        "image_proj.proj.bias": (_TOKENS * context,),
        "image_proj.norm.weight": (context,),
        "image_proj.norm.bias": (context,),
    }
    for index, shape in enumerate(layers):
        for name in ("to_k_ip", "to_v_ip"):
            shapes[f"ip_adapter.{2 * index + 1}.{name}.weight"] = shape
    return shapes


def _state(source: str, description: ModelDescription) -> dict[str, dict[str, Any]]:
    """The weights of one adapter, in the two parts that diffusers takes."""
    path = adapter_file(source)
    state: dict[str, dict[str, Any]] = {"image_proj": {}, "ip_adapter": {}}
    if path is not None:
        from safetensors import safe_open

        with safe_open(path, framework="pt", device="cpu") as file:
            for key in file.keys():  # noqa: SIM118 - no mapping
                part, _, name = key.partition(".")
                if part in state:
                    state[part][name] = file.get_tensor(key)
        return state
    for key, shape in _shapes(source, description).items():
        part, _, name = key.partition(".")
        kind = "bias" if name.endswith("bias") else "norm" if name.startswith("norm") else "weight"
        state[part][name] = draw_weights(shape, kind, f"0/ip_adapter/{key}")
    return state


def _projection(source: str, shapes: _Shapes) -> dict[str, Any]:
    """Which kind of adapter it is, from the names of its image projection."""
    parts = {n.removeprefix("image_proj."): s for n, s in shapes.items() if n.startswith("image_")}
    if not parts or not any(name.startswith("ip_adapter.") for name in shapes):
        seems = seems_to_be(shapes)
        what = f"is {seems}" if seems else f"has {next(iter(shapes), 'nothing')!r}"
        raise CheckpointError(f"--ip-adapter {source} holds no IP-Adapter; it {what}")
    if "proj.weight" in parts:
        rows, width = parts["proj.weight"]
        arguments = {
            "image_embed_dim": width,
            "cross_attention_dim": rows // _TOKENS,
            "num_image_text_embeds": _TOKENS,
        }
        return {"class": STANDARD, "arguments": arguments, "tokens": _TOKENS}
    if "latents" in parts:
        _, tokens, hidden = parts["latents"]
        queries = next(s for n, s in parts.items() if n.startswith("layers.0.") and "to_q" in n)
        arguments = {
            "embed_dims": parts["proj_in.weight"][1],
            "output_dims": parts["proj_out.weight"][0],
            "hidden_dims": hidden,
            "depth": len({n.split(".")[1] for n in parts if n.startswith("layers.")}),
            "heads": queries[0] // 64,
            "num_queries": tokens,
        }
        return {"class": PLUS, "arguments": arguments, "tokens": tokens}
    kind = "a Full Face" if "proj.3.weight" in parts else "a FaceID"
    raise CheckpointError(
        f"--ip-adapter {source} is {kind} IP-Adapter, which is not built yet; built: the standard "
        "and the Plus kinds"
    )


def _cross_attentions(description: ModelDescription) -> list[tuple[int, int]]:
    """(width, width of the context) of each cross-attention, in the order of adapter files."""
    unet = twin(description, "unet", "float32")
    layers = [unet.get_submodule(n.removesuffix(".processor")) for n in unet.attn_processors]
    return [tuple(layer.to_k.weight.shape) for layer in layers if layer.is_cross_attention]


def _check_unet(
    source: str, shapes: _Shapes, projection: dict[str, Any], description: ModelDescription
) -> None:
    # files count every attention; those to the text have the odd numbers
    names = (f"ip_adapter.{number}.to_k_ip.weight" for number in range(1, 2 * len(shapes), 2))
    theirs = [shapes[name] for name in names if name in shapes]
    ours = _cross_attentions(description)
    if theirs == ours:
        return
    wrong = next(((a, b) for a, b in zip(theirs, ours, strict=False) if a != b), None)
    what = (
        f"it has {len(theirs)} cross-attentions, and {description.source} {len(ours)}"
        if wrong is None
        else f"a cross-attention is {wrong[0][1]} → {wrong[0][0]} in it, and "
        f"{wrong[1][1]} → {wrong[1][0]} in {description.source}"
    )
    raise CheckpointError(
        f"--ip-adapter {source} was made for another model: {what}; use the adapter of that family"
    )


def _find_encoder(
    source: str, description: ModelDescription
) -> tuple[ComponentDescription, Path | None]:
    """The image encoder and its folder (None: random, or the model's own)."""
    own = description.components.get("image_encoder")
    if own is not None:
        return own, None if is_random_spec(source) else _encoder_folder(source)
    path = adapter_file(source)
    if path is None:
        config = _random_encoder(description)
        return ComponentDescription("image_encoder", "transformers", _ENCODER, config), None
    folder = _encoder_folder(source)
    if folder is None:
        raise CheckpointError(
            f"--ip-adapter {source}: its image encoder is missing: there is no "
            f"{path.parent / 'image_encoder'}; fetch that folder of the adapter's repository too"
        )
    config = public_config(read_json(folder / "config.json", "the image encoder's configuration"))
    return ComponentDescription("image_encoder", "transformers", _ENCODER, config), folder


def _encoder_folder(source: str) -> Path | None:
    """`image_encoder` beside the adapter, or in the `models` folder that SDXL adapters share.

    The second is where the public "vit-h" adapters for SDXL find the encoder of SD 1.5's.
    """
    path = adapter_file(source)
    if path is None:
        return None
    beside, shared = path.parent / "image_encoder", path.parent.parent / "models" / "image_encoder"
    order = (shared, beside) if "vit-h" in path.name else (beside, shared)
    return next((folder for folder in order if (folder / "config.json").is_file()), None)


def _random_encoder(description: ModelDescription) -> dict[str, Any]:
    channels = description.components["unet"].config.get("block_out_channels", [_REAL_WIDTH])
    if channels[0] < _REAL_WIDTH:
        return dict(_VIT_TINY)
    return dict(_VIT_BIG_G if "XL" in description.pipeline_class else _VIT_H)


def _check_encoder(
    source: str, projection: dict[str, Any], encoder: ComponentDescription, place: Path | None
) -> None:
    standard = projection["class"] == STANDARD
    wanted = projection["arguments"]["image_embed_dim" if standard else "embed_dims"]
    key = "projection_dim" if standard else "hidden_size"
    there = encoder.config.get(key)
    if there is not None and there != wanted:
        raise CheckpointError(
            f"--ip-adapter {source} looks at pictures through an image encoder whose {key} is "
            f"{wanted}, and that in {place or 'use'} has {there}; put the right one into "
            "image_encoder beside it"
        )
