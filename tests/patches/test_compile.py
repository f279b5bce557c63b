"""A patched model compiles in one graph where the stock one does."""

import torch

from sdx_accel.runtime.checkpoints import load


def test_fullgraph_compiles_as_the_stock_model_does():
    unet = load("random:sdxl-tiny", dtype="fp32").unet
    unet.enable_xattn()
    config = unet.config
    pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    arguments = {
        "encoder_hidden_states": torch.randn(2, 77, config.cross_attention_dim),
        "added_cond_kwargs": {
            "text_embeds": torch.randn(2, pooled),
            "time_ids": torch.randn(2, 6),
        },
        "return_dict": False,
    }
    sample, step = torch.randn(2, 4, 8, 8), torch.tensor(1.0)
    torch._dynamo.reset()
    with torch.no_grad():
        expected = unet(sample, step, **arguments)[0]
        compiled = torch.compile(unet, backend="eager", fullgraph=True)
        assert torch.equal(compiled(sample, step, **arguments)[0], expected)
