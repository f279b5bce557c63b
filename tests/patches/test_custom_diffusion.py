"""Custom Diffusion: equal to stock with its trained projections, which are saved and loaded."""

from typing import Any

import pytest
import torch
from diffusers.hooks import apply_layerwise_casting
from diffusers.models import attention_processor as host
from diffusers.models.attention_processor import Attention
from safetensors.torch import load_file
from torch import Tensor, nn

import sdx_patches
from sdx_kernels.errors import InvalidInputs
from sdx_patches.custom_diffusion import (
    SdxCustomDiffusionAttnProcessor,
    SdxEagerCustomDiffusionAttnProcessor,
)

STOCK = {
    "plain": host.CustomDiffusionAttnProcessor,
    "2_0": host.CustomDiffusionAttnProcessor2_0,
}
TRAINED = [(True, True), (True, False), (False, True), (False, False)]


def patched(root: Any, **settings: Any) -> Any:
    sdx_patches.patch(root, owner="test", **settings)
    return root


def layer(
    stock: str = "2_0", kv: bool = True, q_out: bool = True, crosses: bool = True, **changes: Any
) -> Attention:
    torch.manual_seed(0)
    width = 24 if crosses else None
    settings: dict[str, Any] = dict(query_dim=32, cross_attention_dim=width, heads=4, dim_head=8)
    attn = Attention(**settings | changes)
    attn.set_processor(
        STOCK[stock](train_kv=kv, train_q_out=q_out, hidden_size=32, cross_attention_dim=width)
    )
    for parameter in attn.parameters():
        nn.init.normal_(parameter, std=0.3)
    return attn.eval()


def both(attn: Attention, **call: Any) -> tuple[Tensor, Tensor]:
    hidden = torch.randn(2, 15, 32)
    with torch.no_grad():
        expected = attn(hidden, **call)
        ours = patched(attn)(hidden, **call)
    assert isinstance(attn.processor, SdxCustomDiffusionAttnProcessor)
    return ours, expected


@pytest.mark.parametrize("crosses", [False, True])
@pytest.mark.parametrize(("kv", "q_out"), TRAINED)
@pytest.mark.parametrize("stock", list(STOCK))
def test_every_choice_of_trained_parts_equals_stock(
    calls: list[str], stock: str, kv: bool, q_out: bool, crosses: bool
) -> None:
    attn = layer(stock, kv, q_out, crosses)
    ours, expected = both(
        attn, **{"encoder_hidden_states": torch.randn(2, 6, 24)} if crosses else {}
    )
    assert torch.allclose(ours, expected, atol=1e-5)
    assert len(calls) == 1


@pytest.mark.parametrize("q_out", [False, True])
def test_the_hosts_xformers_one_hands_over_its_weights(q_out: bool) -> None:
    # it cannot run here, but ours in its place can
    attn = layer(q_out=q_out)
    hidden, context = torch.randn(2, 15, 32), torch.randn(2, 6, 24)
    other = host.CustomDiffusionXFormersAttnProcessor(
        train_q_out=q_out, hidden_size=32, cross_attention_dim=24
    )
    other.load_state_dict(attn.processor.state_dict())
    with torch.no_grad():
        expected = attn(hidden, encoder_hidden_states=context)
        attn.set_processor(other)
        ours = patched(attn)(hidden, encoder_hidden_states=context)
    assert torch.allclose(ours, expected, atol=1e-5)
    sdx_patches.restore(attn, owner="test")
    assert attn.processor is other


@pytest.mark.parametrize("cross_norm", ["layer_norm", "group_norm"])
def test_the_norm_of_the_text_is_honoured(cross_norm: str) -> None:
    attn = layer(cross_attention_norm=cross_norm, cross_attention_norm_num_groups=4)
    ours, expected = both(attn, encoder_hidden_states=torch.randn(2, 6, 24))
    assert torch.allclose(ours, expected, atol=1e-5)


def test_a_mask_of_the_text_equals_cropped_text() -> None:
    # the host's own pads the mask by the picture's length and fails
    attn = patched(layer())
    hidden, context = torch.randn(2, 15, 32), torch.randn(2, 6, 24)
    mask = torch.zeros(2, 1, 6)
    mask[:, :, 4:] = -10000.0
    with torch.no_grad():
        masked = attn(hidden, encoder_hidden_states=context, attention_mask=mask)
        cropped = attn(hidden, encoder_hidden_states=context[:, :4])
    assert torch.allclose(masked, cropped, atol=1e-5)
    with pytest.raises(InvalidInputs, match="covers 15 positions"):
        attn(hidden, encoder_hidden_states=context, attention_mask=torch.zeros(2, 1, 15))


def test_unscaled_scores_and_fp32_products_are_honoured(op_dtypes: set[torch.dtype]) -> None:
    attn = layer("plain", scale_qk=False)
    ours, expected = both(attn, encoder_hidden_states=torch.randn(2, 6, 24))
    assert torch.allclose(ours, expected, atol=1e-5)
    attn = layer("plain", upcast_attention=True).half()
    with torch.no_grad():
        attn.processor.to_q_custom_diffusion.weight *= 4000
        hidden, context = torch.randn(2, 15, 32).half(), torch.randn(2, 6, 24).half()
        expected = attn(hidden, encoder_hidden_states=context)
        ours = patched(attn)(hidden, encoder_hidden_states=context)
    assert op_dtypes == {torch.float32}
    assert ours.isfinite().all()
    assert (ours - expected).abs().max() <= 1.6e-2


def test_trained_weights_in_fp32_beside_a_16_bit_model() -> None:
    attn = layer(q_out=False)
    attn.half()
    attn.processor.float()
    hidden, context = torch.randn(2, 15, 32).half(), torch.randn(2, 6, 24).half()
    with torch.no_grad():
        expected = attn(hidden, encoder_hidden_states=context)
        ours = patched(attn)(hidden, encoder_hidden_states=context)
    assert ours.dtype == torch.float16
    assert (ours - expected).abs().max() <= 2e-3


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.bfloat16])
def test_weights_stored_in_another_dtype_than_computed(stored: torch.dtype) -> None:
    # the host's own casts the text to the stored dtype and fails
    attn = layer()
    rounded = layer()
    for parameter in rounded.parameters():
        parameter.data = parameter.data.to(stored).float()
    apply_layerwise_casting(attn, stored, torch.float32)
    hidden, context = torch.randn(2, 15, 32), torch.randn(2, 6, 24)
    with torch.no_grad():
        expected = rounded(hidden, encoder_hidden_states=context)
        ours = patched(attn)(hidden, encoder_hidden_states=context)
    assert attn.processor.to_k_custom_diffusion.weight.dtype == stored
    assert torch.allclose(ours, expected, atol=1e-5)


class Quantised(nn.Module):
    """A layer that is stored in 8 bits and widens itself, as quantisation libraries do."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("weight", layer.weight.detach().to(torch.float8_e4m3fn))

    def forward(self, states: Tensor) -> Tensor:
        return nn.functional.linear(states, self.weight.to(states.dtype))


def test_quantised_layers_get_the_text_as_it_is() -> None:
    attn, rounded = layer(), layer()
    for name in ("to_k_custom_diffusion", "to_v_custom_diffusion"):
        quantised = Quantised(getattr(attn.processor, name))
        setattr(attn.processor, name, quantised)
        getattr(rounded.processor, name).weight.data = quantised.weight.float()
    hidden, context = torch.randn(2, 15, 32), torch.randn(2, 6, 24)
    with torch.no_grad():
        expected = rounded(hidden, encoder_hidden_states=context)
        ours = patched(attn)(hidden, encoder_hidden_states=context)
    assert torch.allclose(ours, expected, atol=1e-5)


@pytest.mark.parametrize("crosses", [False, True])
def test_gradients_equal_stock_and_leave_out_the_first_position(crosses: bool) -> None:
    gradients = []
    for enable in (False, True):
        attn = layer(crosses=crosses)
        if enable:
            patched(attn)
        torch.manual_seed(1)
        hidden = torch.randn(2, 15, 32)
        context = torch.randn(2, 6, 24, requires_grad=True) if crosses else None
        attn(hidden, encoder_hidden_states=context).square().mean().backward()
        found = [p.grad for p in attn.processor.parameters()]
        if context is not None:
            assert context.grad is not None
            assert not context.grad[:, 0].any()
            assert context.grad[:, 1:].any()
        gradients.append(found)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*gradients, strict=True))


def test_made_without_arguments_it_uses_the_modules_own_weights() -> None:
    torch.manual_seed(0)
    attn = Attention(query_dim=32, cross_attention_dim=24, heads=4, dim_head=8).eval()
    hidden, context = torch.randn(2, 15, 32), torch.randn(2, 6, 24)
    with torch.no_grad():
        expected = attn(hidden, encoder_hidden_states=context)
        attn.set_processor(SdxCustomDiffusionAttnProcessor())
        ours = attn(hidden, encoder_hidden_states=context)
    assert torch.allclose(ours, expected, atol=1e-6)


def test_fullgraph_compiles_as_the_stock_layer_does() -> None:
    attn = layer()
    hidden, context = torch.randn(2, 16, 32), torch.randn(2, 6, 24)
    for root in (attn, patched(attn)):
        torch._dynamo.reset()
        with torch.no_grad():
            compiled = torch.compile(root, backend="eager", fullgraph=True)
            assert torch.allclose(compiled(hidden, context), root(hidden, context), atol=1e-6)


# a whole UNet ----------------------------------------------------------------------------------


def trained(unet: Any) -> Any:
    """`unet` with trained keys, values, queries and outputs on its cross-attention."""
    torch.manual_seed(9)
    processors = {}
    for name in unet.attn_processors:
        attn = unet.get_submodule(name.removesuffix(".processor"))
        processors[name] = host.CustomDiffusionAttnProcessor2_0(
            train_kv=attn.is_cross_attention, train_q_out=attn.is_cross_attention,
            hidden_size=attn.to_q.out_features, cross_attention_dim=attn.cross_attention_dim,
        )  # fmt: skip
    unet.set_attn_processor(processors)
    return unet.eval()


def attentions(unet: Any) -> list[Attention]:
    return [m for m in unet.modules() if isinstance(m, Attention)]


def test_case_066_the_weights_are_the_same_ones(
    tiny_unet: Any, unet_out: Any, calls: list[str]
) -> None:
    untrained = unet_out(tiny_unet())
    unet = trained(tiny_unet())
    stock = [attn.processor for attn in attentions(unet)]
    before, names = {id(p) for p in unet.parameters()}, list(unet.state_dict())
    expected = unet_out(unet)
    assert not torch.allclose(expected, untrained, atol=1e-2)
    patched(unet)
    assert {id(p) for p in unet.parameters()} == before
    assert list(unet.state_dict()) == names
    assert torch.allclose(unet_out(unet), expected, atol=1e-4)
    assert len(calls) == len(stock)
    assert all(layer.patched for layer in sdx_patches.layers(unet))
    sdx_patches.restore(unet, owner="test")
    assert [attn.processor for attn in attentions(unet)] == stock
    assert torch.equal(unet_out(unet), expected)


def test_an_op_that_adds_one_hundredth_changes_the_output(
    tiny_unet: Any, unet_out: Any, shift_op: Any
) -> None:
    unet = patched(trained(tiny_unet()))
    expected = unet_out(unet)
    shift_op()
    assert (unet_out(unet) - expected).abs().max() > 1e-4


def test_what_is_saved_while_patched_loads_anywhere(
    tiny_sd: Any, tiny_unet: Any, unet_out: Any, tmp_path: Any
) -> None:
    unet = trained(tiny_unet())
    unet.save_attn_procs(tmp_path / "stock", weight_name="trained.safetensors")
    expected = unet_out(patched(unet))
    unet.save_attn_procs(tmp_path / "ours", weight_name="trained.safetensors")
    saved, ours = (load_file(tmp_path / who / "trained.safetensors") for who in ("stock", "ours"))
    assert saved.keys() == ours.keys()
    assert all(torch.equal(saved[name], ours[name]) for name in saved)
    # the file leaves out the layers without weights, which the loader wants to see
    plain = {name: {} for name in unet.attn_processors if "attn1" in name}
    for enabled in (False, True):
        pipe = tiny_sd()
        if enabled:
            patched(pipe)
        pipe.unet.load_attn_procs(ours | plain, _pipeline=pipe)
        assert torch.allclose(unet_out(pipe.unet), expected, atol=1e-4)
        assert {type(attn.processor) for attn in attentions(pipe.unet)} == {
            SdxEagerCustomDiffusionAttnProcessor if enabled else host.CustomDiffusionAttnProcessor
        }
