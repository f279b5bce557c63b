"""What users do to a pipeline, each as one operation on a tiny Stable Diffusion.

It knows diffusers' and our public calls, and nothing of how a patch works. An operation gets a
`Subject` and may replace its pipeline (a copy, another class); our own calls do nothing on a twin.
"""

import contextlib
import copy
import hashlib
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DiffusionPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

import sdx_accel  # noqa: F401  (attaches enable_xattn)

__all__ = ["EXCLUDED", "OPERATIONS", "Operation", "Subject", "build"]

#: What is not in the matrix, and why; printed with the counts.
EXCLUDED = {
    "sequential offload of a text encoder": "accelerate itself fails when both devices are the CPU",
    "enable_xformers_memory_efficient_attention": "needs that package and a GPU; its processors "
    "are replaced and reported like the sliced ones",
    "a VRAM budget": "needs a GPU, or a double of one: the budget's own tests",
}
SIZE = 8


@dataclass
class Subject:
    """A pipeline that things are done to.

    Args:
        ours: whether our own operations act; on a twin they do nothing.
        pipe: the pipeline in use.
        others: pipelines that were in use before, or share models with it.
        records: whatever else operations produced.
        enabled: roots that `enable_xattn` was called on.
    """

    ours: bool
    pipe: Any
    others: list[Any] = field(default_factory=list)
    records: list[Any] = field(default_factory=list)
    enabled: list[Any] = field(default_factory=list)

    def enable(self, root: Any = None, **settings: Any) -> None:
        """`enable_xattn` on the pipeline in use, or on `root`."""
        if self.ours:
            root = self.pipe if root is None else root
            root.enable_xattn(**settings)
            self.enabled.append(root)

    def disable(self, root: Any = None) -> None:
        """`disable_xattn` on the pipeline in use, or on `root`."""
        if self.ours:
            (self.pipe if root is None else root).disable_xattn()

    def disable_all(self) -> None:
        """Everything that was ever enabled, and every copy."""
        for root in (*reversed(self.enabled), self.pipe, *self.others):
            self.disable(root)

    def use(self, pipe: Any) -> None:
        """Go on with `pipe`; the one before stays alive."""
        self.others.append(self.pipe)
        self.pipe = pipe

    @property
    def models(self) -> list[Any]:
        """Everything to compare with a twin."""
        return [self.pipe, self.others, self.records]

    def run(self) -> torch.Tensor:
        """Latents of one step, and their decoded picture, as one row."""
        pipe = self.pipe
        call: dict[str, Any] = dict(
            prompt="a red house", negative_prompt="blue", guidance_scale=5.0, output_type="latent",
            num_inference_steps=1, generator=torch.Generator().manual_seed(7),
        )  # fmt: skip
        if isinstance(pipe, StableDiffusionImg2ImgPipeline):
            call |= {"image": _noise("picture", 1, 3, SIZE, SIZE).sigmoid(), "strength": 1.0}
        else:
            call |= {"height": SIZE, "width": SIZE}
        if pipe.unet.encoder_hid_proj is not None:
            call["ip_adapter_image_embeds"] = [_noise("image prompt", 2, 1, 16)]
        pipe.set_progress_bar_config(disable=True)
        with torch.no_grad():
            latents = pipe(**call).images
            picture = pipe.vae.decode(latents).sample
        return torch.cat([latents.flatten(), picture.flatten()])


@dataclass(frozen=True)
class Operation:
    """One thing that users do.

    Args:
        apply: does it.
        needs: name of an operation without which this one would have no effect.
        undoes: name of an operation that has no effect any more afterwards.
        own: it is ours and does nothing on a twin.
        compiles: it costs seconds, so it is run in fewer patterns.
    """

    apply: Callable[[Subject], None]
    needs: str = ""
    undoes: str = ""
    own: bool = False
    compiles: bool = False


@cache
def _tokenizer_files() -> CLIPTokenizer:
    letters = [chr(code) for code in range(97, 123)]
    words = [*letters, *(letter + "</w>" for letter in letters)]
    vocab = {word: index for index, word in enumerate(words)}
    vocab |= {"<|startoftext|>": len(words), "<|endoftext|>": len(words) + 1}
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=16)


def _noise(name: str, *shape: int, scale: float = 1.0) -> torch.Tensor:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def build() -> Any:
    """Stable Diffusion with four attention layers in its UNet; equal weights every time."""
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        block_out_channels=(32,), layers_per_block=1, sample_size=SIZE, norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D",), mid_block_type="UNetMidBlock2DCrossAttn",
        up_block_types=("UpBlock2D",), cross_attention_dim=32, attention_head_dim=4,
    )  # fmt: skip
    vae = AutoencoderKL(
        block_out_channels=(8,), down_block_types=("DownEncoderBlock2D",), latent_channels=4,
        up_block_types=("UpDecoderBlock2D",), norm_num_groups=4, sample_size=SIZE,
    )  # fmt: skip
    config = CLIPTextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, pad_token_id=1,
        num_attention_heads=4, max_position_embeddings=16, bos_token_id=0, eos_token_id=2,
    )  # fmt: skip
    pipe = StableDiffusionPipeline(
        vae=vae.eval(), text_encoder=CLIPTextModel(config).eval(), tokenizer=_tokenizer_files(),
        unet=unet.eval(), scheduler=DDIMScheduler(clip_sample=False, set_alpha_to_one=False),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    with torch.no_grad():  # plain initial weights give attention next to no weight
        for name, parameter in (*unet.named_parameters(), *vae.named_parameters()):
            if ".to_" in name and name.endswith("weight"):
                parameter.mul_(4.0)
    return pipe


def _lora(pipe: Any) -> dict[str, torch.Tensor]:
    weights = {}
    for component in ("unet", "text_encoder"):
        model = getattr(getattr(pipe, component), "_orig_mod", getattr(pipe, component))
        for name, module in model.named_modules():
            key = f"{component}.{name}".replace(".base_layer", "")
            if name.endswith(("to_q", "to_v", "to_out.0", "q_proj", "out_proj")):
                weights[f"{key}.lora_A.weight"] = _noise(key + "A", 2, module.in_features)
                weights[f"{key}.lora_B.weight"] = _noise(key + "B", module.out_features, 2)
    return weights


def _load_lora(subject: Subject) -> None:
    name = f"style{len(subject.pipe.unet.__dict__.get('peft_config', {}))}"
    subject.pipe.load_lora_weights(_lora(subject.pipe), adapter_name=name)


def _weigh_lora(subject: Subject) -> None:
    names = list(subject.pipe.unet.peft_config)
    subject.pipe.set_adapters(names, [0.25] * len(names))


def _load_ip_adapter(subject: Subject) -> None:
    weights = {}
    names = [n for n in subject.pipe.unet.attn_processors if n.endswith("attn2.processor")]
    for index, name in enumerate(names):
        for part in ("to_k_ip", "to_v_ip"):
            key = f"{2 * index + 1}.{part}.weight"
            weights[key] = _noise(name + part, 32, 32)
    projection = {
        "proj.weight": _noise("projection", 4 * 32, 16),
        "proj.bias": _noise("bias", 4 * 32),
        "norm.weight": torch.ones(32),
        "norm.bias": torch.zeros(32),
    }
    subject.pipe.load_ip_adapter(
        {"image_proj": projection, "ip_adapter": weights},
        subfolder="",
        weight_name="",
        image_encoder_folder=None,
    )


def _default_processors(subject: Subject) -> None:
    for model in (subject.pipe.unet, subject.pipe.vae):
        model.set_default_attn_processor()


def _sequential_offload(subject: Subject) -> None:
    from accelerate import cpu_offload

    for model in (subject.pipe.unet, subject.pipe.vae):
        cpu_offload(model, torch.device("cpu"), offload_buffers=len(model._parameters) > 0)


def _compile(subject: Subject) -> None:
    subject.pipe.unet = torch.compile(subject.pipe.unet, fullgraph=True, backend="eager")


def _save_and_load(subject: Subject) -> None:
    with tempfile.TemporaryDirectory() as above, contextlib.chdir(above):
        folder = "model"  # models keep the path, which has to be the twin's too
        subject.pipe.save_pretrained(folder)
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        subject.records += [
            (str(path.relative_to(folder)), hashlib.sha256(path.read_bytes()).hexdigest())
            for path in files
        ]
        subject.use(DiffusionPipeline.from_pretrained(folder, local_files_only=True))


def _share_the_unet(subject: Subject) -> None:
    first, second = subject.pipe, build()
    second.unet = first.unet
    subject.use(second)
    if subject.enabled:
        subject.enable()
        subject.disable(first)


OPERATIONS: dict[str, Operation] = {
    "enable": Operation(lambda s: s.enable(), own=True),
    "enable with torch's kernels": Operation(lambda s: s.enable(attention_op="torch"), own=True),
    "enable the UNet alone": Operation(lambda s: s.enable(s.pipe.unet), own=True),
    "disable": Operation(lambda s: s.disable(), needs="enable", own=True),
    "load LoRA": Operation(_load_lora),
    "weigh LoRA": Operation(_weigh_lora, needs="load LoRA"),
    "fuse LoRA": Operation(lambda s: s.pipe.fuse_lora(), needs="load LoRA"),
    "unfuse LoRA": Operation(lambda s: s.pipe.unfuse_lora(), needs="fuse LoRA", undoes="fuse LoRA"),
    "unload LoRA": Operation(
        lambda s: s.pipe.unload_lora_weights(), needs="load LoRA", undoes="load LoRA"
    ),
    "load IP-Adapter": Operation(_load_ip_adapter),
    "scale IP-Adapter": Operation(
        lambda s: s.pipe.set_ip_adapter_scale(0.25), needs="load IP-Adapter"
    ),
    "unload IP-Adapter": Operation(
        lambda s: s.pipe.unload_ip_adapter(), needs="load IP-Adapter", undoes="load IP-Adapter"
    ),
    "slice attention": Operation(lambda s: s.pipe.enable_attention_slicing(1)),
    "stop slicing": Operation(
        lambda s: s.pipe.disable_attention_slicing(),
        needs="slice attention",
        undoes="slice attention",
    ),
    "fuse projections": Operation(lambda s: s.pipe.unet.fuse_qkv_projections()),
    "unfuse projections": Operation(
        lambda s: s.pipe.unet.unfuse_qkv_projections(),
        needs="fuse projections",
        undoes="fuse projections",
    ),
    "default processors": Operation(_default_processors),
    "eager text encoder": Operation(
        lambda s: s.pipe.text_encoder.set_attn_implementation("eager")
    ),
    "resize vocabulary": Operation(lambda s: s.pipe.text_encoder.resize_token_embeddings(70)),
    "from_pipe": Operation(
        lambda s: s.use(StableDiffusionImg2ImgPipeline.from_pipe(s.pipe))
    ),
    "share the UNet": Operation(_share_the_unet),
    "model offload": Operation(lambda s: s.pipe.enable_model_cpu_offload(device="cpu")),
    "sequential offload": Operation(_sequential_offload),
    "group offload": Operation(
        lambda s: s.pipe.enable_group_offload(
            onload_device=torch.device("cpu"), offload_type="leaf_level"
        )
    ),
    "cast layer by layer": Operation(
        lambda s: s.pipe.unet.enable_layerwise_casting(
            storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32
        )
    ),
    "checkpoint gradients": Operation(lambda s: s.pipe.unet.enable_gradient_checkpointing()),
    "keep activations": Operation(
        lambda s: s.pipe.unet.disable_gradient_checkpointing(),
        needs="checkpoint gradients",
        undoes="checkpoint gradients",
    ),
    "compile": Operation(_compile, compiles=True),
    "compile repeated blocks": Operation(
        lambda s: s.pipe.unet.compile_repeated_blocks(fullgraph=True, backend="eager"),
        compiles=True,
    ),
    "deepcopy": Operation(lambda s: s.use(copy.deepcopy(s.pipe))),
    "pickle": Operation(lambda s: s.use(pickle.loads(pickle.dumps(s.pipe)))),
    "save and load": Operation(_save_and_load),
}  # fmt: skip
