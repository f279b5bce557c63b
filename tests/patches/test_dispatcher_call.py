"""The call of our backend in diffusers' attention dispatcher, held against diffusers' own."""

import inspect
from typing import Any

import pytest
import torch
from diffusers.models import attention_dispatch as host
from torch import Tensor

from sdx_kernels import registry
from sdx_patches import dispatcher

BACKENDS = host._AttentionBackendRegistry
NAMES = host.AttentionBackendName


def qkv(heads: int = 4, key_heads: int = 4, value_dim: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(2, 5, heads, 8, generator=generator),
        torch.randn(2, 9, key_heads, 8, generator=generator),
        torch.randn(2, 9, key_heads, value_dim, generator=generator),
    )


def test_the_signature_is_the_dispatchers() -> None:
    dispatcher.register()
    native = BACKENDS._backends[NAMES.NATIVE]
    ours = BACKENDS._backends[NAMES("sdx_accel")]
    assert list(inspect.signature(ours).parameters) == list(inspect.signature(native).parameters)
    assert BACKENDS._supported_arg_names[NAMES("sdx_accel")] == set(
        inspect.signature(native).parameters
    )


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.7},
    "causal": {"is_causal": True},
    "bool mask": {"attn_mask": torch.rand(2, 4, 5, 9, generator=torch.Generator()) > 0.3},
    "one mask for all heads": {"attn_mask": (torch.arange(45).reshape(1, 1, 5, 9) % 3) > 0},
    "float mask": {"attn_mask": torch.linspace(-3, 3, 45).reshape(1, 1, 5, 9)},
    "key mask": {"attn_mask": torch.arange(18).reshape(2, 9) % 4 > 0},
    "additive key mask": {"attn_mask": torch.linspace(-3, 0, 18).reshape(2, 9)},
}


@pytest.mark.parametrize("call", list(CALLS))
def test_the_call_equals_diffusers_own_backend(call: str) -> None:
    dispatcher.register()
    before = registry.launches.total()
    ours = host.dispatch_attention_fn(*qkv(), **CALLS[call], backend="sdx_accel")
    assert registry.launches.total() == before + 1
    expected = host.dispatch_attention_fn(*qkv(), **CALLS[call], backend=NAMES.NATIVE)
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_query_heads_share_key_heads_as_in_diffusers(key_heads: int, masked: bool) -> None:
    dispatcher.register()
    q, k, v = qkv(key_heads=key_heads, value_dim=6)
    mask = torch.rand(2, 4, 5, 9, generator=torch.Generator().manual_seed(1)) if masked else None
    call: dict[str, Any] = {"attn_mask": mask, "enable_gqa": True}
    ours = host.dispatch_attention_fn(q, k, v, **call, backend="sdx_accel")
    assert ours.shape == (2, 5, 4, 6)
    expected = host.dispatch_attention_fn(q, k, v, **call, backend=NAMES.NATIVE)
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=0)


def test_gradients_equal_diffusers_own_backend() -> None:
    dispatcher.register()
    grads = []
    for backend in ("sdx_accel", "native"):
        inputs = [t.requires_grad_() for t in qkv()]
        host.dispatch_attention_fn(*inputs, backend=backend).square().sum().backward()
        grads.append([t.grad for t in inputs])
    for ours, expected in zip(*grads, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("key_heads", [2, 4])
def test_the_log_sum_exp_is_that_of_the_scores(key_heads: int) -> None:
    dispatcher.register()
    q, k, v = qkv(key_heads=key_heads)
    ours, lse = host.dispatch_attention_fn(
        q, k, v, backend="sdx_accel", enable_gqa=True, attention_kwargs={"return_lse": True}
    )
    wide = k.repeat_interleave(4 // key_heads, dim=2)
    scores = torch.einsum("bmhk,bnhk->bhmn", q, wide) * 8**-0.5
    torch.testing.assert_close(lse, scores.logsumexp(-1), atol=2e-5, rtol=0)
    plain = host.dispatch_attention_fn(q, k, v, backend="sdx_accel", enable_gqa=True)
    torch.testing.assert_close(ours, plain, atol=2e-5, rtol=0)


def test_what_it_cannot_do_is_a_value_error() -> None:
    q, k, v = qkv()
    with pytest.raises(ValueError, match="context parallelism"):
        dispatcher.backend_function(None, q, k, v, _parallel_config=object())
    with pytest.raises(ValueError, match="not both"):
        dispatcher.backend_function(
            None, q, k, v, attn_mask=torch.ones(5, 9).bool(), is_causal=True
        )
    with pytest.raises(ValueError, match="no dropout"), torch.no_grad():
        dispatcher.backend_function(None, q, k, v, return_lse=True, dropout_p=0.5)
    with pytest.raises(ValueError, match="no gradient"):
        dispatcher.backend_function(None, q.requires_grad_(), k, v, return_lse=True)
    with pytest.raises(ValueError, match="batch and heads"):
        dispatcher.backend_function(None, *qkv(key_heads=2))


def test_diffusers_own_checks_accept_it(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher.register()
    monkeypatch.setattr(BACKENDS, "_checks_enabled", True)
    ours = host.dispatch_attention_fn(*qkv(), backend="sdx_accel")
    assert ours.shape == (2, 5, 4, 8)
