"""What holds a plan back, and what half a GiB more would buy."""

from collections.abc import Callable

from sdx_accel.budget.plan import Plan
from sdx_accel.budget.units import GIB, about, say_seconds, say_size

__all__ = ["MORE_BYTES", "advice"]

MORE_BYTES = GIB // 2
# what is worth a word: below a MiB it is rounding
LEAST_GIB = 1 / 1024


def advice(make: Callable[[int], Plan], plan: Plan) -> tuple[str, ...]:
    """Sentences for the reader of a plan that fits.

    Args:
        make: the plan of the same job for a budget in bytes.
        plan: the plan that is to be explained.

    Returns:
        What binds and what more memory buys; nothing for a plan that does not fit.
    """
    if not plan.feasible:
        return ()
    more = make(round(plan.budget_gib * GIB) + MORE_BYTES)
    return f"binds: {_binding(plan)}", f"0.5 GiB more: {_gain(plan, more)}"


def _binding(plan: Plan) -> str:
    stream = plan.stream("denoise")
    if stream is not None:
        copying = stream.streamed_bytes / stream.copy_speed(plan.machine)
        if copying >= stream.bound_seconds * (1 - 1e-3):
            return f"the link, {say_seconds(copying)} of copies a step"
        if stream.seconds > stream.bound_seconds * 1.01:
            return "the ring, which computing and copying wait for in turn"
        return "computing; the copies of a step take less time"
    if not plan.moved_gib_per_picture:
        return "nothing: all weights stay on the card"
    tightest = max(plan.phases, key=lambda phase: phase.predicted_peak_gib)
    return f"the memory of {tightest.name}"


def _gain(plan: Plan, more: Plan) -> str:
    faster = round((plan.seconds_per_step - more.seconds_per_step) * 1000, 1)
    less = plan.moved_gib_per_picture - more.moved_gib_per_picture
    gains, costs = [], []
    if faster > 0:
        gains.append(f"{faster:g} ms less a step")
    elif faster < 0:
        costs.append(f"{-faster:g} ms more a step")
    if plan.streams and not more.streams:
        gains.append("nothing is streamed")
    elif not faster and _streamed(plan) - _streamed(more) >= GIB // 100:
        less_copied = (_streamed(plan) - _streamed(more)) / GIB
        gains.append(f"{less_copied:.2f} GiB less to copy a step, which is no faster")
    if less >= LEAST_GIB:
        gains.append(f"{say_size(less)} less to move for each new prompt")
    elif less <= -LEAST_GIB:
        # only other numerics can do that: equal ones never move more for more memory
        seconds = -less * GIB / more.machine.link_bytes_per_s
        costs.append(f"{say_size(-less)} more to move for each new prompt ({about(seconds)})")
    changed = sorted(
        name for name in plan.numerics if plan.numerics[name] != more.numerics.get(name)
    )
    gains += [f"{name} becomes {more.numerics[name]}" for name in changed]
    said = ", ".join(gains) or "no gain"
    return f"{said}, at the price of {' and '.join(costs)}" if costs else said


def _streamed(plan: Plan) -> int:
    stream = plan.stream("denoise")
    return 0 if stream is None else stream.streamed_bytes
