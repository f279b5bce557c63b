"""The embeddings of a prompt that was seen before: no encoder runs, and nothing can spoil them."""

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model

import sdx_accel  # noqa: F401  (attaches the methods)
from sdx_accel.runtime.checkpoints import load
from sdx_accel.runtime.prompt_cache import PromptCache

PROMPT = {"prompt": "a red apple", "negative_prompt": "blurred"}


@pytest.fixture(scope="module")
def loaded():
    pipe = load("random:sdxl-tiny", dtype="fp32")
    pipe.set_progress_bar_config(disable=True)
    return pipe


class _Calls:
    """Counts the calls of both text encoders without a hook on them."""

    def __init__(self, pipe, patch):
        self.count = 0
        for encoder in (pipe.text_encoder, pipe.text_encoder_2):
            forward = encoder.forward

            def watched(*args, _forward=forward, **kwargs):
                self.count += 1
                return _forward(*args, **kwargs)

            patch.setattr(encoder, "forward", watched)


@pytest.fixture
def pipe(loaded):
    loaded.enable_xattn(vram=8, device="cpu", attention_op="torch")
    yield loaded
    loaded.disable_xattn()


@pytest.fixture
def calls(pipe, monkeypatch):
    return _Calls(pipe, monkeypatch)


@torch.no_grad()
def _encode(pipe, **arguments):
    return pipe.encode_prompt(**{**PROMPT, **arguments})


def _equal(one, other):
    return all(
        torch.equal(a, b) and a.stride() == b.stride() and a.dtype == b.dtype
        for a, b in zip(one, other, strict=True)
    )


def _phases(executor):
    entered = []
    enter = executor.enter
    executor.enter = lambda phase: (entered.append(phase), enter(phase))[1]
    return entered


def _run(pipe, **arguments):
    generator = torch.Generator().manual_seed(0)
    return pipe(
        **PROMPT, height=64, width=64, num_inference_steps=1, generator=generator,
        output_type="latent", **arguments,
    ).images  # fmt: skip


def test_same_prompt_runs_no_encoder_and_enters_no_text_phase(pipe, calls):
    entered = _phases(pipe.__dict__["_sdx_budget"].executor)
    first = _run(pipe)
    assert calls.count == 4
    assert "text" in entered
    entered.clear()
    assert torch.equal(_run(pipe), first)
    assert calls.count == 4
    assert "text" not in entered


def test_what_comes_back_is_what_the_encoders_gave(pipe, calls):
    first = _encode(pipe)
    second = _encode(pipe)
    assert calls.count == 4
    assert isinstance(second, tuple)
    assert _equal(first, second)
    assert not any(a.data_ptr() == b.data_ptr() for a, b in zip(first, second, strict=True))


def test_cached_embeds_cannot_be_spoilt(pipe, calls):
    computed = _encode(pipe)
    wanted = [tensor.clone() for tensor in computed]
    # neither the tensors that were computed nor those that were given back
    for tensors in (computed, _encode(pipe), _encode(pipe)):
        for tensor in tensors:
            tensor.zero_()
    assert _equal(_encode(pipe), wanted)
    assert calls.count == 4


@pytest.mark.parametrize(
    "other",
    [
        {"prompt": "two pears"},
        {"prompt": ["a red apple", "a red apple"], "negative_prompt": ["blurred"] * 2},
        {"negative_prompt": None},
        {"negative_prompt": ""},
        {"prompt_2": "in oil"},
        {"clip_skip": 1},
        {"num_images_per_prompt": 2},
        {"do_classifier_free_guidance": False},
    ],
)
def test_another_argument_is_another_prompt(pipe, calls, other):
    _encode(pipe)
    before = calls.count
    _encode(pipe, **other)
    assert calls.count > before
    # both are kept now, and told apart
    now = calls.count
    assert not _same(_encode(pipe), _encode(pipe, **other))
    assert calls.count == now


def _same(one, other):
    return all(
        (a is None) == (b is None) and (a is None or (a.shape == b.shape and torch.equal(a, b)))
        for a, b in zip(one, other, strict=True)
    )


def test_what_cannot_be_compared_goes_past_it(pipe, calls):
    embeds, negative, pooled, negative_pooled = _encode(pipe)
    given = {
        "prompt": None,
        "negative_prompt": None,
        "prompt_embeds": embeds,
        "negative_prompt_embeds": negative,
        "pooled_prompt_embeds": pooled,
        "negative_pooled_prompt_embeds": negative_pooled,
    }
    assert torch.equal(_encode(pipe, **given)[0], embeds)
    embeds[0, 0, 0] += 1
    assert torch.equal(_encode(pipe, **given)[0], embeds)
    # with gradients
    count = calls.count
    pipe.encode_prompt(**PROMPT)[0].sum().backward()
    assert calls.count > count
    pipe.text_encoder.zero_grad()
    pipe.text_encoder_2.zero_grad()
    with pytest.raises(TypeError, match="nonsense"):
        pipe.encode_prompt(nonsense=1)


def test_hooks_of_others_see_every_call(pipe, calls):
    _encode(pipe)
    layer = next(m for m in pipe.text_encoder.modules() if isinstance(m, torch.nn.LayerNorm))
    handle = layer.register_forward_hook(lambda module, args, out: out * 2)
    changed = _encode(pipe)
    assert calls.count == 8
    handle.remove()
    assert not _same(changed, _encode(pipe))
    assert calls.count == 8


def test_a_lora_in_the_text_encoder_misses(loaded, calls):
    pipe = loaded
    plain = _encode(pipe)
    encoder = pipe.text_encoder
    config = LoraConfig(r=2, lora_alpha=2, target_modules=["q_proj"], init_lora_weights=False)
    # as loaders do: with the weights at home
    pipe.__dict__["_sdx_budget"].executor.bring_home()
    inject_adapter_in_model(config, encoder)
    full = _encode(pipe)
    assert not _same(full, plain)
    half = _encode(pipe, lora_scale=0.5)
    assert not _same(half, full)
    count = calls.count
    assert _same(_encode(pipe), full)
    assert _same(_encode(pipe, lora_scale=0.5), half)
    assert pipe._lora_scale == 0.5
    assert calls.count == count
    for layer in encoder.modules():
        if hasattr(layer, "lora_A"):
            layer.set_scale("default", 0.25)
    assert not _same(_encode(pipe), full)
    assert calls.count > count
    pipe.disable_xattn()
    for name, module in list(encoder.named_modules()):
        if hasattr(module, "base_layer"):
            parent, _, leaf = name.rpartition(".")
            setattr(encoder.get_submodule(parent), leaf, module.base_layer)


def test_changed_weights_miss(pipe, calls):
    wanted = _encode(pipe)
    norm = next(m for m in pipe.text_encoder.modules() if isinstance(m, torch.nn.LayerNorm))
    with torch.no_grad():
        norm.weight.mul_(2)
    assert not _same(_encode(pipe), wanted)
    with torch.no_grad():
        norm.weight.div_(2)
    assert _same(_encode(pipe), wanted)
    assert calls.count == 12
    pipe.__dict__["_sdx_budget"].executor.bring_home()
    _encode(pipe)
    assert calls.count == 16


def test_the_oldest_leaves(pipe):
    executor = pipe.__dict__["_sdx_budget"].executor
    seen = []

    def encode_prompt(self, prompt):
        seen.append(prompt)
        return (torch.ones(1),)

    cached = PromptCache(executor, maxsize=2)
    encode = cached.wrap(encode_prompt)
    with torch.no_grad():
        for prompt in ("a", "b", "a", "c", "a", "b", True, 1):
            encode(pipe, prompt)
    assert seen == ["a", "b", "c", "b", True, 1]
    assert cached.hits == 2


def test_the_stock_method_is_back_afterwards(loaded):
    stock = type(loaded).encode_prompt
    loaded.enable_xattn(vram=8, device="cpu")
    assert type(loaded).encode_prompt is not stock
    assert type(loaded).encode_prompt.__doc__ == stock.__doc__
    loaded.disable_xattn()
    assert type(loaded).encode_prompt is stock
