"""The ring by itself: order of copies and computation, calls out of order, and what is refused."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

from sdx_accel.budget.plan import StreamPlan
from sdx_accel.errors import PlacementError
from sdx_accel.runtime import stream_order
from sdx_accel.runtime.copies import HostCopies
from sdx_accel.runtime.pinning import HostPinner
from sdx_accel.runtime.stream_order import CALL, UnitTrace, layout
from sdx_accel.runtime.streamer import Streamer
from sdx_accel.runtime.weights import WeightUnit, unit_bytes

from .stream_case import Early, Late

WIDTH = 16


class Block(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
        self.register_buffer("shift", torch.randn(WIDTH))

    def forward(self, x):
        return x + torch.tanh(self.second(torch.relu(self.first(x)))) + self.shift


class Model(nn.Module):
    """Blocks of different sizes, run in the order of `calls`, and a scale that is in no block."""

    def __init__(self, number=8):
        super().__init__()
        self.blocks = nn.ModuleList(Block(8 + 24 * (i % 3)) for i in range(number))
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.calls = tuple(range(number))

    def forward(self, x):
        for i in self.calls:
            x = self.blocks[i](x) * self.scale
        return x


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    monkeypatch.setattr(stream_order, "STREAM_BYTES", 12 << 10)
    torch.manual_seed(0)
    with torch.no_grad():
        yield


X = torch.linspace(-1, 1, 3 * WIDTH).reshape(3, WIDTH)


def _ring(model, copies, resident=(), ring=2, number=1):
    """A streamer over a model (or several, one after the other), and its plan; not started."""
    models = model if isinstance(model, dict) else {"unet": model}
    trace = UnitTrace(models)
    with trace.watch():
        for part in models.values():
            part(X)
    layouts = {n: layout(n, m, trace.orders()[n]) for n, m in models.items()}
    units = {n: [WeightUnit(n, g) for g in found.groups] for n, found in layouts.items()}
    # as after a driver has granted everything
    assert all(unit.pin(HostPinner()) for held in units.values() for unit in held)
    order = [unit for found in layouts.values() for unit in found.units]
    gone = [i for i in range(len(order)) if i not in resident]
    total = sum(order[i].n_bytes for i in gone)
    size = ring * max(order[i].n_bytes for i in gone) if ring else total
    slots, offset = [], 0
    for i in gone:
        if offset + order[i].n_bytes > size:
            offset = 0
        slots.append((i, offset))
        offset += order[i].n_bytes
    rest = sum(unit_bytes(g) for found in layouts.values() for g in found.groups) - total
    plan = StreamPlan(
        "denoise", tuple(models), tuple(resident), tuple(slots), rest, size, total, 0.0, 0.0
    )
    return Streamer(models, units, order, copies), plan


@pytest.mark.parametrize("copies", [Late, Early])
@pytest.mark.parametrize("resident", [(), (0, 3, 4), (7,)])
@pytest.mark.parametrize("ring", [1, 2, 3, None])
def test_results_equal_those_of_the_resident_model(copies, resident, ring):
    model = Model()
    expected = model(X)
    streamer, plan = _ring(model, copies(), resident, ring)
    streamer.start(plan)
    for _ in range(3):
        assert torch.equal(model(X), expected)
    assert streamer.passes == 3
    streamer.stop()
    assert torch.equal(model(X), expected)


@pytest.mark.parametrize("copies", [Late, Early])
@pytest.mark.parametrize(
    "calls",
    [
        pytest.param((0, 1, 3, 2, 4, 5, 6, 7), id="out of order"),
        pytest.param((0, 1, 6, 7), id="skipped"),
        pytest.param((0, 1, 2, 2, 2, 3, 4, 5, 6, 7), id="repeated"),
        pytest.param((7, 6, 5, 4, 3, 2, 1, 0), id="backwards"),
        pytest.param((5,), id="one"),
    ],
)
def test_any_order_of_calls_is_right(copies, calls):
    model = Model()
    streamer, plan = _ring(model, copies())
    whole = model(X)
    model.calls = calls
    expected = model(X)
    streamer.start(plan)
    for _ in range(2):
        assert torch.equal(model(X), expected)
    model.calls = tuple(range(8))
    # found its way back: from the second pass on, one copy for each unit
    assert torch.equal(model(X), whole)
    before = streamer.streamed_bytes
    assert torch.equal(model(X), whole)
    assert streamer.streamed_bytes - before == plan.streamed_bytes


def test_two_models_are_one_cycle():
    models = {"controlnet": Model(3), "unet": Model(5)}
    expected = [model(X) for model in models.values()]
    copies = Late()
    streamer, plan = _ring(models, copies, resident=(1, 4))
    streamer.start(plan)
    for _ in range(2):
        assert all(torch.equal(m(X), e) for m, e in zip(models.values(), expected, strict=True))
    assert streamer.passes == 2
    # without the first: late, and right
    for _ in range(2):
        assert torch.equal(models["unet"](X), expected[1])


def test_one_copy_a_unit_a_pass_and_nothing_is_allocated():
    model, copies = Model(), Late()
    streamer, plan = _ring(model, copies, resident=(2,), ring=2)
    streamer.start(plan)
    assert copies.allocated == 2
    model(X)
    addresses = [t.data_ptr() for t in model.parameters()]
    for _ in range(3):
        before = streamer.streamed_bytes
        model(X)
        assert streamer.streamed_bytes - before == plan.streamed_bytes
    assert copies.allocated == 2
    assert addresses == [t.data_ptr() for t in model.parameters()]
    copies.drain()
    # always the same round of seven
    streamed = copies.copied[-21:]
    assert len(set(streamed)) == 7
    assert streamed == streamed[:7] * 3


def test_the_ring_runs_ahead_into_the_next_pass():
    model, copies = Model(), Early()
    streamer, plan = _ring(model, copies, ring=3)
    streamer.start(plan)
    ahead = streamer.streamed_bytes
    first = copies.copied[-3:]
    model(X)
    assert ahead > 0
    assert streamer.streamed_bytes == plan.streamed_bytes + ahead
    assert copies.copied[-3:] == first


def test_a_failure_in_a_unit_leaves_a_ring_that_works_on():
    model = Model()
    expected = model(X)
    streamer, plan = _ring(model, Late())
    streamer.start(plan)

    def fail(module, args):
        raise RuntimeError("no memory")

    for number in range(8):
        handle = model.blocks[number].second.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="no memory"):
            model(X)
        handle.remove()
        if number % 2:
            streamer.reset()
        assert torch.equal(model(X), expected)


def test_stop_gives_back_the_stock_model():
    model = Model()
    before = [set(m.__dict__) for m in model.modules()]
    hooks = [len(m._forward_hooks) for m in model.modules()]
    tensors = [id(t) for t in model.parameters()]
    streamer, plan = _ring(model, Late())
    streamer.start(plan)
    assert all(CALL in block.__dict__ for block in model.blocks)
    model(X)
    streamer.stop()
    assert [set(m.__dict__) for m in model.modules()] == before
    assert [len(m._forward_hooks) for m in model.modules()] == hooks
    assert [id(t) for t in model.parameters()] == tensors
    assert not model._state_dict_pre_hooks


@pytest.mark.parametrize("ends", ["stop", "restart", "failure"])
def test_the_blobs_go_at_once(ends):
    # a cycle of references would keep them until the garbage collector comes by: on a card the
    # next picture's ring then lay beside the last one's, 226 MiB beyond the plan
    model = Model()
    copies, blobs = HostCopies(), []

    def allocate(n_bytes):
        if ends == "failure" and len(blobs) == 1:
            raise torch.OutOfMemoryError("no room for the ring")
        blob = torch.empty(n_bytes, dtype=torch.uint8)
        blobs.append(weakref.ref(blob))
        return blob

    copies.allocate = allocate
    streamer, plan = _ring(model, copies)
    gc.disable()
    try:
        if ends == "failure":
            with pytest.raises(torch.OutOfMemoryError):
                streamer.start(plan)
        else:
            streamer.start(plan)
            model(X)
            if ends == "restart":
                streamer.reset()
                model(X)
        streamer.stop()
        assert [blob() for blob in blobs] == [None] * len(blobs)
    finally:
        gc.enable()


def test_copies_of_a_block_are_stock():
    model = Model()
    streamer, plan = _ring(model, Late())
    streamer.start(plan)
    for twin in (
        copy.deepcopy(model.blocks[1]),
        pickle.loads(pickle.dumps(model.blocks[1])),
    ):
        assert CALL not in twin.__dict__
    assert CALL in model.blocks[1].__dict__


def test_reading_the_weights_ends_the_stream():
    model = Model()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    streamer, plan = _ring(model, Late())
    streamer.start(plan)
    model(X)
    read = model.state_dict()
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in expected.items())
    assert CALL not in model.blocks[0].__dict__


def test_gradients_are_refused():
    model = Model()
    streamer, plan = _ring(model, Late())
    streamer.start(plan)
    with torch.enable_grad(), pytest.raises(PlacementError, match="gradients"):
        model(X)
    streamer.stop()
    with torch.enable_grad():
        model(X).sum().backward()


def test_a_model_compiled_as_a_whole_is_refused():
    model = Model()
    streamer, plan = _ring(model, Late())
    model.compile(backend="eager")
    with pytest.raises(PlacementError, match="compile its blocks"):
        streamer.start(plan)


def test_a_compiler_that_goes_past_the_units_is_found_out():
    model = Model()
    streamer, plan = _ring(model, Late())
    streamer.start(plan)
    # what a compiler does with the calls inside its root
    for block in model.blocks:
        block.__dict__.pop(CALL)
    with pytest.raises(PlacementError, match="ran past its weights"):
        model(X)


def test_compiled_blocks_stream():
    model = Model(4)
    streamer, plan = _ring(model, Late())
    expected = model(X)
    compiled = 0

    def backend(graph, inputs):
        nonlocal compiled
        compiled += 1
        return graph.forward

    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    streamer.start(plan)
    for _ in range(2):
        assert torch.equal(model(X), expected)
    made = compiled
    assert made
    assert torch.equal(model(X), expected)
    # addresses do not change, so no guard fails
    assert compiled == made
    assert hasattr(model.blocks[0].__dict__[CALL], "_torchdynamo_orig_callable")
    streamer.stop()
    assert hasattr(model.blocks[0].__dict__[CALL], "_torchdynamo_orig_callable")
    assert torch.equal(model(X), expected)


def test_weights_of_another_plan_are_refused():
    model = Model()
    _, plan = _ring(model, Late())
    other, _ = _ring(Model(9), Late())
    with pytest.raises(PlacementError, match="made for"):
        other.start(plan)
    other.stop()


@pytest.mark.parametrize("calls", [range(8), (5, 6, 7)])
def test_a_graph_waits_for_nothing_from_before_it(calls):
    class Capturing(Late):
        def __init__(self):
            super().__init__()
            self.capture, self.known, self.joined = False, set(), False

        def capturing(self):
            return self.capture

        def _seen(self, event):
            if self.capture:
                assert event.token in self.known, "an event from before the capture"

        def copy(self, target, source, after, done):
            # from its first wait on, the stream of copies is part of the graph
            self.joined = self.joined or bool(self.capture and after)
            assert not self.capture or self.joined, "a copy that is not part of the graph"
            for event in after:
                self._seen(event)
            super().copy(target, source, after, done)
            self.known.add(done.token)

        def wait(self, event):
            self._seen(event)
            super().wait(event)

        def mark(self, event):
            super().mark(event)
            self.known.add(event.token)

    model, copies = Model(), Capturing()
    streamer, plan = _ring(model, copies, resident=(3,))
    model.calls = calls
    expected = model(X)
    streamer.start(plan)
    model(X)
    streamer.reset()
    streamer.capture_ready()
    before = streamer.streamed_bytes
    copies.known, copies.capture = set(), True
    assert torch.equal(model(X), expected)
    copies.capture = False
    assert not copies._waiting
    if len(calls) == 8:
        # the graph ends as it began: with the same units ahead
        assert streamer.streamed_bytes - before == plan.streamed_bytes
    streamer.reset()
    assert torch.equal(model(X), expected)


def test_torch_compile_of_the_whole_is_found_out():
    model = Model()
    streamer, plan = _ring(model, Late())
    streamer.start(plan)
    with pytest.raises(PlacementError, match="ran past its weights"):
        torch.compile(model, backend="eager")(X)
    streamer.stop()
