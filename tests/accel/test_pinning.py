"""A driver that locks a part of the host memory, or none: equal bits, and a host that goes on."""

import logging
from pathlib import Path

import pytest
import torch

from sdx_accel.runtime import budget_session, profiler, stream_order, weights
from sdx_accel.runtime.checkpoints import load
from sdx_accel.runtime.copies import HostCopies
from sdx_accel.runtime.executor import Executor
from sdx_accel.runtime.pinning import HostPinner, Pinned, Staging
from sdx_accel.runtime.weights import WeightUnit

from .stream_case import Early, Late, streaming

STEPS = 2
KIB = 1 << 10
MIB = 1 << 20


class Driver(HostPinner):
    """Locks what comes first, up to a number of blobs or of bytes."""

    def __init__(self, blobs=None, n_bytes=None):
        self.blobs, self.n_bytes = blobs, n_bytes
        self.asked = 0
        self.locked = {}

    def lock(self, blob):
        self.asked += 1
        if self.blobs is not None and self.asked > self.blobs:
            return False
        if self.n_bytes is not None and sum(self.locked.values()) + blob.numel() > self.n_bytes:
            return False
        assert blob.data_ptr() not in self.locked
        self.locked[blob.data_ptr()] = blob.numel()
        return True

    def unlock(self, blob):
        del self.locked[blob.data_ptr()]

    def holds(self, data):
        """Whether all bytes of a tensor are locked."""
        first = data.data_ptr()
        return any(p <= first and first + data.numel() <= p + n for p, n in self.locked.items())


@pytest.fixture(scope="module", autouse=True)
def small_units():
    """Units of at most 400 KiB in blobs of at most 1 MiB."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_order, "STREAM_BYTES", 400 * KIB)
        patch.setattr(stream_order, "UNIT_BYTES", MIB)
        patch.setattr(weights, "UNIT_BYTES", MIB)
        profiler._traced.cache_clear()
        yield
    profiler._traced.cache_clear()


@pytest.fixture(scope="module")
def loaded():
    pipe = load("random:sdxl-tiny", dtype="fp32")
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture
def pipe(loaded):
    yield loaded
    loaded.disable_xattn()


def _run(pipe):
    return pipe(
        "a red apple", height=64, width=64, num_inference_steps=STEPS, output_type="latent",
        generator=torch.Generator().manual_seed(0),
    ).images  # fmt: skip


@pytest.fixture(scope="module")
def latents(loaded, small_units):
    """What the same pipeline makes with everything in place."""
    loaded.enable_xattn()
    made = _run(loaded)
    loaded.disable_xattn()
    return made


@pytest.fixture
def hold(monkeypatch):
    """`hold(pipe, driver, copies)` has it stream from memory that this driver locks."""

    def begin(pipe, driver, copies=None, phases=("text", "denoise")):
        class Moving(Executor):
            def __init__(self, *args, moves):
                super().__init__(*args, moves=True, copies=copies or Late(), pinner=driver)

            def hold(self, plan):
                super().hold(streaming(plan, self.modules, phases, 2, 2) if phases else plan)

        monkeypatch.setattr(budget_session, "Executor", Moving)
        pipe.enable_xattn(vram=8, device="cpu", learn=False)
        return pipe.__dict__["_sdx_budget"].executor

    return begin


def _largest(executor):
    return max(
        unit.n_bytes
        for stream in executor.plan.streams
        for name in stream.components
        for unit in executor.stream_units(name)
    )


@pytest.mark.parametrize("copies", [Late, Early])
@pytest.mark.parametrize("granted", [0, 1, 2, 5, None])
def test_refused_from_the_nth_blob_on_changes_no_bit(pipe, hold, latents, caplog, granted, copies):
    driver = Driver(granted)
    with caplog.at_level(logging.WARNING, logger="sdx_accel"):
        executor = hold(pipe, driver, copies())
        assert torch.equal(_run(pipe), latents)
        assert torch.equal(_run(pipe), latents)
    said = [record.message for record in caplog.records if "could be locked" in record.message]
    pinned = [unit.pinned for units in executor._units.values() for unit in units]
    if granted is None:
        assert executor._pinned.buffer is None
        assert executor.unpinned_bytes == 0
        assert all(pinned)
        assert said == []
    else:
        # the first was the buffer for all that is refused later; said once, not with each picture
        assert sum(pinned) == max(granted - 1, 0)
        assert (executor._pinned.buffer is not None) is (granted > 0)
        assert executor.unpinned_bytes > 0
        assert len(said) == 1
        assert ("passes through a buffer" in said[0]) is (granted > 0)
    pipe.disable_xattn()
    assert driver.locked == {}
    assert executor._pinned.buffer is None


def test_the_buffer_holds_at_most_two_units(pipe, hold):
    executor = hold(pipe, Driver(3))
    assert executor._pinned.buffer.numel() == 2 * -(-_largest(executor) // 512) * 512


@pytest.mark.parametrize("n_bytes", [300 * KIB, 700 * KIB, 3 * MIB])
def test_no_copy_is_made_from_memory_that_is_not_locked(pipe, hold, latents, monkeypatch, n_bytes):
    """So the host stands still at none: that is what a copy from such memory makes it do."""
    monkeypatch.setattr("sdx_accel.runtime.pinning.LEAST_BUFFER", 8 * KIB)
    driver, sources = Driver(n_bytes=n_bytes), []

    class Watched(Late):
        def copy(self, target, source, after, done):
            sources.append(driver.holds(source))
            super().copy(target, source, after, done)

    executor = hold(pipe, driver, Watched())
    assert torch.equal(_run(pipe), latents)
    assert len(sources) > 100
    assert all(sources)
    assert sum(driver.locked.values()) <= n_bytes
    # of what remains beside the buffer, as many whole blobs as fit are locked
    locked = sum(u.n_bytes for units in executor._units.values() for u in units if u.pinned)
    assert locked + executor._pinned.buffer.numel() == sum(driver.locked.values())
    assert (locked > 0) is (n_bytes > 2 * MIB)


def test_the_host_waits_for_the_copy_before_the_last_only(pipe, hold, latents):
    finished, issued = [], []

    class Watched(Late):
        def copy(self, target, source, after, done):
            issued.append(done)
            super().copy(target, source, after, done)

        def finish(self, event):
            finished.append(len(issued) - 1 - max(i for i, e in enumerate(issued) if e is event))
            super().finish(event)

        def wait(self, event):
            # what the device waits for is none of the host's business
            Late.finish(self, event)
            self._in_use = event.target

    hold(pipe, Driver(1), Watched())
    assert torch.equal(_run(pipe), latents)
    # the newest copy was always left alone
    assert finished
    assert min(finished) >= 1


def test_a_driver_that_grants_more_later_is_asked_again(pipe, hold, latents):
    driver = Driver(2)
    executor = hold(pipe, driver)
    first = executor.unpinned_bytes
    assert torch.equal(_run(pipe), latents)
    driver.blobs = None
    assert torch.equal(_run(pipe), latents)
    assert first > 0 == executor.unpinned_bytes
    assert executor._pinned.buffer is None
    assert all(unit.pinned for unit in executor._units["unet"])


def test_a_known_limit_is_kept_with_the_buffer(pipe):
    class Blob:
        n_bytes, pinned = 4 * MIB, False

        def pin(self, pinner):
            self.memory = torch.empty(self.n_bytes, dtype=torch.uint8)
            self.pinned = pinner.lock(self.memory)
            return self.pinned

    driver, blobs = Driver(), [Blob() for _ in range(4)]
    pinned = Pinned(driver)
    assert "0.01 of 0.02 GiB" in pinned.lock(blobs, 11 * MIB, MIB)
    assert [blob.pinned for blob in blobs] == [True, True, False, False]
    assert sum(driver.locked.values()) == 10 * MIB
    assert pinned.refused_bytes == 8 * MIB
    # as often as it is asked again
    assert pinned.lock(blobs, 11 * MIB, MIB) is None
    assert sum(driver.locked.values()) == 10 * MIB
    # just enough for all, so no buffer is needed
    driver, blobs = Driver(), [Blob() for _ in range(4)]
    pinned = Pinned(driver)
    assert pinned.lock(blobs, 16 * MIB, MIB) is None
    assert all(blob.pinned for blob in blobs)
    assert pinned.buffer is None


@pytest.mark.parametrize("half", [512, 1024, 4096])
def test_pieces_of_any_size_pass_through_the_buffer(half):
    torch.manual_seed(0)
    source = torch.randint(256, (5000,), dtype=torch.uint8)
    # a gap between them, as where a tensor ends before the next one's place
    pieces = [(0, source[:700]), (1024, source[700:2200]), (2560, source[2200:])]
    copies = Late()
    staging = Staging(torch.empty(2 * half, dtype=torch.uint8), copies)
    targets = [torch.empty(5632, dtype=torch.uint8) for _ in range(3)]
    events = [copies.event() for _ in targets]
    for target, event in zip(targets, events, strict=True):
        staging.copy(target, pieces, [], event)
    copies.finish(events[-1])
    for target in targets:
        for offset, data in pieces:
            assert torch.equal(target[offset : offset + data.numel()], data)


# weights that stay where they were loaded


def _files_of(tensors):
    """The files that tensors' memory is mapped from, "" where there is none."""
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        words = line.split(maxsplit=5)
        start, end = (int(word, 16) for word in words[0].split("-"))
        ranges.append((start, end, words[5].strip() if len(words) > 5 else ""))
    at = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return [next((f for start, end, f in ranges if start <= p < end), "") for p in at]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("m")
    load("random:sdxl-tiny", dtype="fp32").save_pretrained(place)
    return place


@pytest.fixture
def from_files(folder):
    from diffusers import StableDiffusionXLPipeline

    if not Path("/proc/self/maps").exists():
        pytest.skip("this system does not tell what memory is mapped from")
    pipe = StableDiffusionXLPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    assert all(name.endswith(".safetensors") for name in _files_of(pipe.unet.parameters()))
    return pipe


def _tensors(pipe):
    modules = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    return [tensor for module in modules for _, tensor in weights.weight_tensors(module)]


def test_weights_that_cannot_be_locked_stay_mapped_from_their_files(from_files, hold):
    pipe = from_files
    pipe.enable_xattn()
    expected = _run(pipe)
    pipe.disable_xattn()
    tensors = _tensors(pipe)
    before = [tensor.data_ptr() for tensor in tensors], _files_of(tensors)
    allocated = []
    empty = torch.empty

    def counted(*args, **kwargs):
        made = empty(*args, **kwargs)
        allocated.append(made.numel() if made.dtype == torch.uint8 else 0)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", counted)
        executor = hold(pipe, Driver(0), phases=())
    held = sum(unit.n_bytes for units in executor._units.values() for unit in units)
    # a blob was offered to the driver, and let go
    assert sum(allocated) <= 2 * MIB < held
    assert ([tensor.data_ptr() for tensor in tensors], _files_of(tensors)) == before
    assert torch.equal(_run(pipe), expected)
    pipe.disable_xattn()
    # the very memory that they had
    assert ([tensor.data_ptr() for tensor in tensors], _files_of(tensors)) == before


def test_locked_weights_are_no_longer_in_the_files_memory(from_files, hold):
    executor = hold(from_files, Driver())
    assert all(unit.pinned for unit in executor._units["unet"])
    mapped = _files_of(from_files.unet.parameters())
    assert not any(name.endswith(".safetensors") for name in mapped)
    from_files.disable_xattn()


@pytest.mark.parametrize("change", ["strided", "inference", "permuted"])
def test_tensors_that_cannot_be_copied_from_where_they_are(change):
    module = torch.nn.Conv2d(4, 6, 3)
    expected = module.weight.detach().clone()
    if change == "strided":
        module.weight.data = torch.stack([expected, expected], dim=-1)[..., 0]
    elif change == "permuted":
        module.weight.data = expected.to(memory_format=torch.channels_last)
    else:
        with torch.inference_mode():
            module.register_buffer("extra", torch.ones(3))
    unit = WeightUnit("x", list(weights.weight_tensors(module)))
    gathered = len(unit.pieces(0, unit.n_bytes)) == 1
    assert gathered is (change != "permuted")
    unit.load(torch.device("cpu"))
    assert torch.equal(module.weight, expected)
    assert module.weight.is_contiguous(memory_format=torch.channels_last) is (change == "permuted")
    unit.drop()
    assert unit.pin(HostPinner())
    assert torch.equal(module.weight, expected)
    unit.close()
    assert torch.equal(module.weight, expected)


def test_copies_without_a_card_finish_at_once():
    assert HostCopies().finish(None) is None
