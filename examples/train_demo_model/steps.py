"""Run a training step again and again until time is up, as a CUDA graph where that works.

Launching the kernels of a small model one by one takes the host longer than the GPU takes to run
them (8–9 steps/s at batch 512 on an H200); a captured step costs the host one call.
"""

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from progress import Clock
from torch import Tensor

__all__ = ["capture", "rate_at", "run_for"]

WARM_STEPS = 4
LOG_EVERY_S = 10.0


def capture(
    step: Callable[[], None], device: torch.device, clock: Clock
) -> tuple[Callable[[], None], str]:
    """`step` as a replay of a CUDA graph, and a word on how it runs.

    `step` must read and write the same tensors each time and draw random numbers from torch's
    generator of the device only. It is run `WARM_STEPS` times here.
    """
    if device.type != "cuda":
        return step, "eager: no GPU"
    generator = torch.cuda.default_generators[device.index or 0]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for index in range(WARM_STEPS):
            # the first one chooses algorithms and compiles what is not compiled yet
            with clock.part(f"  warm-up step {index + 1} of {WARM_STEPS}"):
                step()
                side.synchronize()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    spare = generator.clone_state()
    graph = torch.cuda.CUDAGraph()
    try:
        with clock.part("  capture of the graph"):
            with torch.cuda.graph(graph, stream=side):
                step()
            torch.cuda.synchronize()
        with clock.part("  first replay of the graph"):
            graph.replay()
            torch.cuda.synchronize()
    except Exception as error:  # whatever it is, training goes on without the graph
        clock.say(f"no CUDA graph, eager steps instead: {type(error).__name__}: {error}")
        # the generator still believes that it is being captured
        generator.graphsafe_set_state(spare)
        torch.cuda.synchronize()
        return step, f"eager: {type(error).__name__}: {error}"[:500]
    return graph.replay, "CUDA graph"


def rate_at(share: float, peak: float, warm: float = 0.03) -> float:
    """Learning rate after `share` (0…1) of the phase's time: a short rise, then half a cosine."""
    if share < warm:
        return peak * max(share / warm, 0.01)
    return peak * 0.5 * (1.0 + math.cos(math.pi * min(1.0, (share - warm) / (1.0 - warm))))


def run_for(
    seconds: float,
    step: Callable[[], None],
    rate: Tensor,
    peak: float,
    loss: Tensor,
    device: torch.device,
    clock: Clock,
    *,
    most_steps: int | None = None,
    every: float = math.inf,
    save: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Steps until `seconds` have passed; capturing counts, so the phase never takes longer.

    Args:
        rate: the tensor that holds the learning rate.
        loss: the tensor that holds the running mean of the loss.
        most_steps: stop after so many (a dry run).
        every: seconds between calls of `save`.

    Returns:
        What the report should hold: steps, steps per second, the losses over time.
    """
    started = time.monotonic()
    rate.fill_(rate_at(0.0, peak))
    replay, how = capture(step, device, clock)
    clock.say(f"  steps run as: {how}")
    losses: list[tuple[float, float]] = []
    steps, logged, saved = 0, started, started
    begun = time.monotonic()
    while (now := time.monotonic()) - started < seconds and steps != most_steps:
        share = (now - started) / seconds if most_steps is None else steps / most_steps
        rate.fill_(rate_at(share, peak))
        replay()
        steps += 1
        # the host must not run ahead of the clock by more than a few steps
        if steps % 8 == 0 and device.type == "cuda":
            torch.cuda.synchronize()
        if now - logged > LOG_EVERY_S or steps == 1:
            losses.append((round(now - started, 1), round(loss.item(), 5)))
            clock.say(f"  step {steps}  loss {losses[-1][1]}")
            logged = now
            if not math.isfinite(losses[-1][1]):
                clock.say("  the loss is not finite: phase ended")
                break
        if now - saved > every:
            try:
                save()
            except Exception as error:  # the next one, or the last, may work
                clock.say(f"  not saved: {type(error).__name__}: {error}")
            saved = time.monotonic()
    if device.type == "cuda":
        torch.cuda.synchronize()
    passed = time.monotonic() - begun
    return {
        "how": how,
        "steps": steps,
        "steps_per_s": round(steps / max(passed, 1e-9), 2),
        "warm_s": round(begun - started, 1),
        "losses": [*losses, (round(time.monotonic() - started, 1), round(loss.item(), 5))],
    }
