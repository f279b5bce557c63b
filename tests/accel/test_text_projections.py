"""Which layers read the text, and what is kept of them without a pipeline."""

from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig

from sdx_accel.runtime.architectures import architecture
from sdx_accel.runtime.meta_models import meta_component
from sdx_accel.runtime.random_models import build_random_component
from sdx_patches.text_kv import TextKV, text_projections

TINY = "random:sdxl-tiny"
LAYERS = 22


@pytest.fixture
def unet():
    return build_random_component(architecture(TINY).components["unet"], torch.float32)


def test_inference_mode_finds_edits_by_content(unet):
    with torch.inference_mode():
        text = torch.randn(2, 77, unet.config.cross_attention_dim)
        kv = TextKV(unet, text_projections(unet), lambda _: nullcontext())
        assert kv.fill(text) is True
        assert kv.fill(text) is False
        text[0, 0, 0] += 1
        assert kv.fill(text) is True


def test_which_layers_read_the_text(unet):
    full = meta_component(architecture("random:sdxl").components["unet"], "float16")
    kept = [full.get_submodule(name).weight for name in text_projections(full)]
    # 70 layers of cross-attention
    assert (len(kept), sum(w.numel() * 2 for w in kept)) == (140, 650 << 20)
    names = text_projections(unet)
    assert len(names) == LAYERS
    assert all(name.endswith(("attn2.to_k", "attn2.to_v")) for name in names)
    vae = build_random_component(architecture(TINY).components["vae"], torch.float32)
    unet.add_adapter(LoraConfig(r=2, target_modules=["to_k"]))
    assert text_projections(unet) == names
    unet.unload_lora()
    unet.fuse_qkv_projections()
    assert [name.rpartition(".")[2] for name in text_projections(unet)] == ["to_kv"] * (LAYERS // 2)
    unet.unfuse_qkv_projections()
    assert text_projections(unet) == names
    attn = unet.mid_block.attentions[0].transformer_blocks[0].attn2
    attn.norm_cross = torch.nn.Identity()
    assert len(text_projections(unet)) == LAYERS - 2
    unet.mid_block.compile(backend="eager")
    assert text_projections(unet) == []
    assert text_projections(vae) == []
