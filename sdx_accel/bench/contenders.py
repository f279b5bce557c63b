"""What a streamed step is compared with: the link alone, a step as one graph, other offloading.

Also what the cases are made of: a pipeline with a ControlNet, one with a LoRA, a timed picture.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sdx_accel.bench.cell import PROMPTS, StepClock

__all__ = [
    "DENOISERS",
    "PEERS",
    "add_lora",
    "graphed",
    "measure_link",
    "offload",
    "recorded_calls",
    "renew",
    "step_of",
    "timed_picture",
    "with_controlnet",
]

#: the models that run in every step
DENOISERS = ("controlnet", "unet")
#: group offloading cannot be taken off again, so it is the last
PEERS = ("model offload", "sequential offload", "group offload, leaf, stream")

# a model's arguments and keywords by its name
Calls = dict[str, tuple[Any, Any]]


@contextmanager
def recorded_calls(pipe: Any) -> Iterator[Calls]:
    """The arguments of each denoiser's last call in the block."""
    calls: Calls = {}
    handles = []
    for name in DENOISERS:
        if (model := getattr(pipe, name, None)) is not None:

            def keep(module: Any, args: Any, kwargs: Any, name: str = name) -> None:
                calls[name] = args, kwargs

            handles.append(model.register_forward_pre_hook(keep, with_kwargs=True))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def step_of(pipe: Any, calls: Calls) -> Callable[[], Any]:
    """The denoisers' part of a step, to be run again and again; returns the UNet's output."""
    models = [(getattr(pipe, name), *calls[name]) for name in DENOISERS if name in calls]

    def step() -> Any:
        for model, args, kwargs in models:
            out = model(*args, **kwargs)
        return out

    return step


def timed_picture(
    pipe: Any,
    clock: StepClock,
    prompt: int,
    *,
    size: int,
    steps: int,
    guidance: float,
    **arguments: Any,
) -> tuple[Any, float, float]:
    """One picture, decode included.

    Args:
        pipe: ready to run.
        clock: marks its steps.
        prompt: number of the text in `cell.PROMPTS`.
        size: width and height.
        steps: how many.
        guidance: above 1, the UNet's batch is 2.
        arguments: what else the pipeline takes.

    Returns:
        Latents on the host, median seconds a step, seconds.
    """
    import torch

    latents = None

    def mark(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        nonlocal latents
        latents = values["latents"]
        return clock.mark(pipe, step, timestep, values)

    begin = time.perf_counter()
    pipe(
        PROMPTS[prompt],
        height=size,
        width=size,
        num_inference_steps=steps,
        guidance_scale=guidance,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
        callback_on_step_end=mark,
        **arguments,
    )
    whole = time.perf_counter() - begin
    assert latents is not None
    return latents.cpu(), statistics.median(clock.seconds()), whole


def graphed(step: Callable[[], Any], ready: Callable[[], None] | None = None) -> tuple[float, Any]:
    """A step replayed as one CUDA graph.

    Args:
        step: runs on the current stream and returns a tuple of tensors.
        ready: called after two eager steps, right before the capture.

    Returns:
        Median seconds of five replays, and the first tensor of the output on the host.
    """
    import torch

    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                step()
            if ready is not None:
                ready()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            out = step()
        torch.cuda.synchronize()
        times = []
        for _ in range(6):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[1:]), out[0].cpu()


def measure_link(device: str, throttle: float | None) -> tuple[Any, float]:
    """(copies, bytes a second that they reach beside a busy GPU).

    Args:
        device: "cuda", or "cpu" for a dry run, where the speed is not measured.
        throttle: hold the copies down to so many GB/s; None for the link as it is.
    """
    import torch

    from sdx_accel.runtime.copies import CudaCopies, HostCopies

    if device == "cpu":
        return HostCopies(), 10e9
    place = torch.device("cuda", torch.cuda.current_device())
    copies = CudaCopies(place, None if throttle is None else throttle * 1e9)
    size, number = 64 << 20, 16
    source = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    target = copies.allocate(size)
    matrix = torch.randn(4096, 4096, dtype=torch.float16, device=place)
    done = copies.event()
    seconds = []
    for _ in range(3):
        copies.drain()
        begin = time.perf_counter()
        for _ in range(number):
            copies.copy(target, source, [], done)
            # more work than the copy takes: the GPU stays busy
            for _ in range(12):
                torch.mm(matrix, matrix)
        done.synchronize()
        seconds.append(time.perf_counter() - begin)
    copies.drain()
    return copies, number * size / min(seconds)


def with_controlnet(pipe: Any, spec: str) -> Any:
    """An SDXL pipeline with a ControlNet of random weights."""
    from diffusers import StableDiffusionXLControlNetPipeline

    from sdx_accel.runtime.architectures import architecture
    from sdx_accel.runtime.controlnets import load_controlnet, with_controlnets

    source = "random:controlnet"
    described = with_controlnets(architecture(spec), [source], "text").components["controlnet"]
    net = load_controlnet(source, described, pipe.unet.dtype)
    return StableDiffusionXLControlNetPipeline(
        **pipe.components, controlnet=net, add_watermarker=False
    )


def add_lora(pipe: Any) -> None:
    """A LoRA of rank 16 with random weights on the attention of the UNet, not merged."""
    import torch
    from peft import LoraConfig

    torch.manual_seed(0)
    layers = ["to_q", "to_k", "to_v", "to_out.0"]
    config = LoraConfig(r=16, target_modules=layers, init_lora_weights=False)
    pipe.unet.add_adapter(config)


def offload(pipe: Any, peer: str) -> None:
    """Switch one of diffusers' own ways on, see `PEERS`, in place of another one."""
    import torch

    pipe.remove_all_hooks()
    if peer == "model offload":
        pipe.enable_model_cpu_offload()
    elif peer == "sequential offload":
        pipe.enable_sequential_cpu_offload()
    else:
        pipe.enable_group_offload(
            onload_device=torch.device("cuda"), offload_type="leaf_level", use_stream=True
        )


def renew(pipe: Any, peer: str) -> None:
    """Put the weights back to the host and switch `peer` on again, where it can be taken off."""
    if peer != PEERS[-1]:
        pipe.remove_all_hooks()
        pipe.to("cpu")
        offload(pipe, peer)
