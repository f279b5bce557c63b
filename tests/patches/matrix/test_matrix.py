"""Two operations in either order, with ours switched on before, between or after them.

Every combination is compared with a stock twin: the same pictures while ours is on, and, after
`disable_xattn`, the same objects at the same places. Users call these in any order, and no host
function that replaces processors, hooks or configurations was written with us in mind.
"""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0

import sdx_patches

from .operations import OPERATIONS, Subject, build
from .orders import Order, combinations, play, steps
from .twins import Correspondence

PAIRS = [(first, second) for first in OPERATIONS for second in OPERATIONS]
COMPILING = ("compile", "compile repeated blocks")
#: What `make test` plays; another seed gives another sample of the same matrix.
SLICE = random.Random(7).sample(
    [order for order in combinations() if not {order.first, order.second} & set(COMPILING)], 27
) + random.Random(7).sample(
    [order for order in combinations() if {order.first, order.second} & set(COMPILING)], 3
)


@pytest.mark.parametrize("order", SLICE, ids=str)
def test_a_sample_of_the_orders_equals_the_twin(order: Order) -> None:
    play(order)


#: Orders in which the whole matrix has found something.
ONCE_WRONG = ("ENABLE, load IP-Adapter, unload IP-Adapter, fuse projections",)


@pytest.mark.parametrize("name", ONCE_WRONG)
def test_an_order_that_was_wrong_once_equals_the_twin(name: str) -> None:
    (order,) = [order for order in combinations() if str(order) == name]
    play(order)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), PAIRS, ids=lambda name: name)
def test_every_moment_of_a_pair_equals_the_twin(first: str, second: str) -> None:
    failed = {}
    mine = [order for order in combinations() if (order.first, order.second) == (first, second)]
    assert len(mine) >= 3
    for order in mine:
        try:
            play(order)
        except AssertionError as error:
            failed[str(order)] = str(error)
    assert failed == {}


@pytest.mark.parametrize("name", [name for name, done in OPERATIONS.items() if not done.own])
def test_an_operation_changes_the_stock_pipeline(name: str) -> None:
    """Without it the matrix would compare untouched pipelines with untouched pipelines."""
    with_it, without = (Subject(False, build()) for _ in range(2))
    for needed in steps(name, name)[: steps(name, name).index(name)]:
        for subject in (with_it, without):
            OPERATIONS[needed].apply(subject)
    match = Correspondence()
    assert match.differences(with_it.models, without.models) == []
    OPERATIONS[name].apply(with_it)
    assert match.differences(with_it.models, without.models) != []


@pytest.mark.parametrize("name", [name for name, done in OPERATIONS.items() if done.own])
def test_an_operation_of_ours_changes_what_serves_the_layers(name: str) -> None:
    subject = Subject(True, build())
    if OPERATIONS[name].needs:
        OPERATIONS[OPERATIONS[name].needs].apply(subject)
    before = sdx_patches.layers(subject.pipe)
    OPERATIONS[name].apply(subject)
    assert sdx_patches.layers(subject.pipe) != before
    subject.disable_all()
    assert not any(layer.patched for layer in sdx_patches.layers(subject.pipe))


def test_all_pairs_are_there_and_every_moment_of_each() -> None:
    """The number is printed with the results; here is where it comes from."""
    found = {(order.first, order.second) for order in combinations()}
    assert found == set(PAIRS)
    plain = [o for o in combinations() if not {o.first, o.second} & set(COMPILING)]
    assert len(plain) == sum(
        len(steps(first, second)) + 1
        for first, second in PAIRS
        if not {first, second} & set(COMPILING)
    )
    assert steps("load LoRA", "unload LoRA") == ("load LoRA", "unload LoRA")
    assert steps("unload LoRA", "unload LoRA") == ("load LoRA", "unload LoRA") * 2


def _swap_processor(pipe: Any) -> None:
    pipe.unet.mid_block.attentions[0].transformer_blocks[0].attn1.processor = AttnProcessor2_0()


def _share_processor(pipe: Any) -> None:
    block = pipe.unet.mid_block.attentions[0].transformer_blocks[0]
    block.attn1.processor = block.attn2.processor


def _reorder_modules(pipe: Any) -> None:
    norm = pipe.unet._modules.pop("conv_norm_out")
    pipe.unet._modules["conv_norm_out"] = norm


def _copy_configuration(pipe: Any) -> None:
    pipe.text_encoder.config = copy.copy(pipe.text_encoder.config)


#: Traces that a careless undo could leave, one for each thing that a twin is compared for.
TRACES: dict[str, Callable[[Any], Any]] = {
    "an attribute": lambda pipe: setattr(pipe.unet.mid_block, "_left", None),
    "an attribute of the pipeline": lambda pipe: setattr(pipe, "_left", None),
    "a hook": lambda pipe: pipe.vae.decoder.register_forward_pre_hook(lambda *args: None),
    "an equal processor": _swap_processor,
    "a shared processor": _share_processor,
    "an order of modules": _reorder_modules,
    "an equal configuration": _copy_configuration,
    "an implementation": lambda pipe: pipe.text_encoder.set_attn_implementation("eager"),
    "a weight": lambda pipe: pipe.unet.conv_in.weight.data.add_(1e-6),
    "a flag": lambda pipe: pipe.unet.eval().mid_block.train(),
}


@pytest.mark.parametrize("trace", list(TRACES))
def test_the_comparison_finds(trace: str) -> None:
    ours, twin = build(), build()
    match = Correspondence()
    assert match.differences(ours, twin) == []
    TRACES[trace](ours)
    assert match.differences(ours, twin) != []


def test_another_picture_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Subject.run

    def shifted(subject: Subject) -> torch.Tensor:
        return run(subject) + (1e-5 if subject.ours else 0.0)

    monkeypatch.setattr(Subject, "run", shifted)
    with pytest.raises(AssertionError, match="outputs differ"):
        play(Order("fuse projections", "deepcopy", 0, False))


def test_an_error_of_ours_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Subject.run

    def failing(subject: Subject) -> torch.Tensor:
        if subject.ours:
            raise OSError("broken")
        return run(subject)

    monkeypatch.setattr(Subject, "run", failing)
    with pytest.raises(AssertionError, match="the twin did not"):
        play(Order("fuse projections", "deepcopy", 0, False))


def test_what_is_left_of_ours_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Subject, "disable_all", lambda subject: None)
    with pytest.raises(AssertionError, match="left on the models"):
        play(Order("slice attention", "stop slicing", 0, True))
