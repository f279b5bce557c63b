"""One cross-attention layer with an IP-Adapter, its prompts, and stock beside ours."""

from typing import Any

import torch
from diffusers.models import attention_processor as host
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn

import sdx_patches
from sdx_patches.ip_adapter import SdxIPAdapterAttnProcessor

STOCK = {
    "plain": host.IPAdapterAttnProcessor,
    "2_0": host.IPAdapterAttnProcessor2_0,
}


def patched(root: Any, **settings: Any) -> Any:
    sdx_patches.patch(root, owner="test", **settings)
    return root


def layer(stock: str = "2_0", tokens: tuple[int, ...] = (4,), **changes: Any) -> Attention:
    torch.manual_seed(0)
    settings: dict[str, Any] = dict(query_dim=32, cross_attention_dim=24, heads=4, dim_head=8)
    attn = Attention(**settings | changes)
    attn.set_processor(STOCK[stock](hidden_size=32, cross_attention_dim=24, num_tokens=tokens))
    for parameter in attn.parameters():
        nn.init.normal_(parameter, std=0.3)
    return attn.eval()


def prompt(*tokens: int, images: int = 1) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(1)
    return torch.randn(2, 6, 24), [torch.randn(2, images, count, 24) for count in tokens]


def both(attn: Attention, context: Any, **call: Any) -> tuple[Tensor, Tensor]:
    hidden = torch.randn(2, 15, 32)
    with torch.no_grad():
        expected = attn(hidden, encoder_hidden_states=context, **call)
        ours = patched(attn)(hidden, encoder_hidden_states=context, **call)
    assert isinstance(attn.processor, SdxIPAdapterAttnProcessor)
    return ours, expected
