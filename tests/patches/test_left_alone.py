"""What is replaced and what is not: every class of the host is accounted for, with its reason."""

import inspect
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionPAGPipeline
from diffusers.models import attention_processor as host
from diffusers.models.attention_processor import Attention
from torch import Tensor

import sdx_patches
from sdx_patches import compat
from sdx_patches.attention import SdxAttnProcessor
from sdx_patches.families.tables import LEFT_PROCESSORS, REPLACED
from sdx_patches.report import Layer


def patched(root: Any, **settings: Any) -> Any:
    sdx_patches.patch(root, owner="test", **settings)
    return root


class RecordingProcessor(host.AttnProcessor):
    """Somebody's own: keeps the attention probabilities of its layer."""

    def __init__(self) -> None:
        self.maps: list[Tensor] = []

    def __call__(self, attn: Attention, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        query = attn.head_to_batch_dim(attn.to_q(hidden_states))
        key = attn.head_to_batch_dim(attn.to_k(hidden_states))
        self.maps.append(attn.get_attention_scores(query, key))
        return super().__call__(attn, hidden_states, *args, **kwargs)


def test_case_081_attention_maps_of_a_users_processor(tiny_unet: Any, unet_out: Any) -> None:
    maps: list[list[Tensor]] = []
    for enable in (False, True):
        unet = tiny_unet()
        recording = [
            m for m in unet.modules() if isinstance(m, Attention) and not m.is_cross_attention
        ]
        for attn in recording[:2]:
            attn.set_processor(RecordingProcessor())
        if enable:
            patched(unet)
        unet_out(unet)
        maps.append([m for attn in recording[:2] for m in attn.processor.maps])
    assert len(maps[0]) == len(maps[1]) == 2
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*maps, strict=True))
    left = [layer for layer in sdx_patches.layers(unet) if not layer.patched]
    assert [layer.running for layer in left] == ["RecordingProcessor"] * 2
    assert all("attention maps" in layer.reason for layer in left)


def unaccounted() -> list[str]:
    """The host's processor classes that no table names."""
    defined = [
        cls
        for name, cls in vars(host).items()
        if isinstance(cls, type) and "Processor" in name and cls.__module__ == host.__name__
    ]
    assert len(defined) > 40
    names = {compat.qualified_name(cls) for cls in defined}
    return sorted(names - REPLACED.keys() - LEFT_PROCESSORS.keys())


def test_every_processor_of_the_host_is_replaced_or_has_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert unaccounted() == []
    assert all(LEFT_PROCESSORS.values())
    new = type("NewAttnProcessor", (), {"__module__": host.__name__})
    monkeypatch.setattr(host, "NewAttnProcessor", new, raising=False)
    assert unaccounted() == [f"{host.__name__}.NewAttnProcessor"]


@pytest.mark.parametrize("name", sorted(REPLACED))
def test_our_classes_are_what_the_host_and_the_walk_expect(name: str) -> None:
    ours = REPLACED[name].processor
    stock = getattr(host, name.rpartition(".")[2])
    made = ours()
    assert isinstance(made, SdxAttnProcessor)
    assert made.stock is None
    # loaders and options of the host decide by these words, and by isinstance
    assert "XFormers" not in str(ours)
    assert "flash" not in str(ours).lower()
    assert ("Added" in str(ours)) == ("Added" in name)
    assert isinstance(made, torch.nn.Module) == issubclass(stock, torch.nn.Module)
    named = set(inspect.signature(made.__call__).parameters)
    theirs = inspect.signature(stock.__call__).parameters
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    passed = {n for n, parameter in theirs.items() if parameter.kind not in kinds} - {"self"}
    assert passed <= named, "the host passes only arguments that are named"


def test_perturbed_attention_guidance_stays_stock_and_is_reported(
    tiny_unet: Any, tiny_sd: Any, latents: Any, calls: list[str]
) -> None:
    parts = {name: part for name, part in tiny_sd().components.items() if name != "image_encoder"}
    pipe = StableDiffusionPAGPipeline(
        **parts, pag_applied_layers=["mid"], requires_safety_checker=False
    )
    pipe.set_progress_bar_config(disable=True)
    call = {"pag_scale": 0.9}
    expected = latents(pipe, **call)
    assert not torch.allclose(latents(pipe, pag_scale=0.0), expected, atol=1e-3)
    seen: list[dict[str, Layer]] = []

    def note(*args: Any) -> None:
        seen.append({layer.path: layer for layer in sdx_patches.layers(pipe)})

    patched(pipe)
    handle = pipe.unet.register_forward_hook(note)
    assert torch.allclose(latents(pipe, **call), expected, atol=1e-4)
    handle.remove()
    left = [layer for layer in seen[-1].values() if not layer.patched]
    assert [layer.path for layer in left] == [
        "unet.mid_block.attentions.0.transformer_blocks.0.attn1"
    ]
    assert left[0].running == "PAGCFGIdentitySelfAttnProcessor2_0"
    assert "perturbed" in left[0].reason
    assert len(calls) == 3 + 2 * (8 - 1) + 3
    assert all(layer.patched for layer in sdx_patches.layers(pipe))
    sdx_patches.restore(pipe, owner="test")
    attentions = [m for m in pipe.unet.modules() if isinstance(m, Attention)]
    assert {type(m.processor) for m in attentions} == {host.AttnProcessor2_0}


def test_a_users_subclass_of_a_host_class_is_left_alone(tiny_unet: Any) -> None:
    class Mine(host.IPAdapterAttnProcessor2_0):
        pass

    unet = tiny_unet()
    attn = next(m for m in unet.modules() if isinstance(m, Attention))
    attn.set_processor(Mine(hidden_size=64, cross_attention_dim=32))
    mine = attn.processor
    patched(unet)
    assert attn.processor is mine
    sdx_patches.restore(unet, owner="test")
    assert attn.processor is mine
