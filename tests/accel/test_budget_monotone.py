"""More memory never makes a picture slower.

Without fused kernels there is one exception: where it buys the bits of the whole decode.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

import sdx_accel
from sdx_accel.budget.machine import Machine
from sdx_accel.budget.plan import Plan
from sdx_accel.budget.units import GIB

GENERIC = Machine.generic()
# an H200 whose UNet step takes 57 ms: the link is nearer to what computing takes
FAST = replace(GENERIC, link_bytes_per_s=50e9, flops_per_s=237e12)
WHOLE, BANDS = "whole picture", "bands of rows (fast)"
QUALITIES = ("exact", "near")


def _plans(
    model: str,
    side: int,
    budgets: Iterator[float],
    machine: Machine,
    quality: str,
    fused: bool = True,
) -> list[Plan]:
    given = {"height": side, "width": side, "machine": machine, "quality": quality}
    return [sdx_accel.plan(model, vram=b, fused=fused, **given) for b in budgets]


def _steps(first: float, last: float, step: float) -> Iterator[float]:
    return (round(first + i * step, 4) for i in range(round((last - first) / step) + 1))


def _seconds(plan: Plan) -> float:
    """A picture of a new prompt, without the decode, in twenty steps."""
    moving = plan.moved_gib_per_picture * GIB / plan.machine.link_bytes_per_s
    return moving + 20 * plan.seconds_per_step


def _check(plans: list[Plan], quality: str, first: str = BANDS) -> int:
    """Raises where more memory is worse; how often it bought the decode `first` at a price."""
    feasible = [plan.feasible for plan in plans]
    assert feasible == sorted(feasible)
    fitting = [plan for plan in plans if plan.feasible]
    wanted = [plan.numerics["vae_mode"] == first for plan in fitting]
    if quality == "exact":
        assert wanted == sorted(wanted)
    bought = 0
    for less, more in pairwise(fitting):
        where = f"{less.model}, {less.budget_gib} → {more.budget_gib} GiB"
        if quality == "near":
            assert _seconds(more) <= _seconds(less), where
            continue
        assert more.seconds_per_step <= less.seconds_per_step, where
        if more.numerics == less.numerics:
            assert more.moved_gib_per_picture <= less.moved_gib_per_picture, where
        elif more.moved_gib_per_picture > less.moved_gib_per_picture:
            # bits before speed, and both plans say so
            assert (less.numerics["vae_mode"], more.numerics["vae_mode"]) != (first, first)
            assert more.numerics["vae_mode"] == first, where
            assert any(word.startswith("quality near: at least") for word in more.advice), where
            bought += 1
    return bought


@pytest.mark.parametrize(
    ("side", "budgets", "bought"),
    [
        # the cheapest of all placements moves more for a new prompt at the second and the fourth;
        # before them from streams to a resident UNet
        (512, (5.1, 5.2, 5.3, 5.7, 5.8, 6.5, 6.6), 0),
        # from bands to the whole decode, where it is what runs without a budget
        (1024, (6.1, 6.2, 6.3, 6.5), 1),
    ],
)
def test_more_memory_is_never_slower(side: int, budgets: tuple[float, ...], bought: int) -> None:
    plans = _plans("random:sdxl", side, iter(budgets), GENERIC, "exact")
    assert _check(plans, "exact") == 0
    plans = _plans("random:sdxl", side, iter(budgets), GENERIC, "exact", fused=False)
    assert _check(plans, "exact", WHOLE) == bought


def test_half_a_gibibyte_more_names_the_price_of_the_whole_decode() -> None:
    at, more = _plans("random:sdxl", 1024, iter((6.2, 6.7)), GENERIC, "exact", fused=False)
    dearer = more.moved_gib_per_picture - at.moved_gib_per_picture
    assert dearer > 2
    assert at.advice[1] == (
        "0.5 GiB more: vae_mode becomes whole picture, at the price of "
        f"{dearer:.2f} GiB more to move for each new prompt (about {dearer * GIB / 12e9:.3g} s)"
    )
    # and from the other side: what near would spare is what it spares
    (near,) = _plans("random:sdxl", 1024, iter((6.7,)), GENERIC, "near", fused=False)
    said = next(word for word in more.advice if word.startswith("quality near"))
    spared = more.moved_gib_per_picture - near.moved_gib_per_picture
    assert 2 < float(said.split()[4]) <= spared + 0.01
    assert not any(word.startswith("quality near") for word in (*at.advice, *near.advice))


def test_near_takes_bands_where_they_spare_as_much_as_tiles() -> None:
    exact, near = (
        _plans("random:sdxl", 1024, iter((10.0,)), GENERIC, q, fused=False)[0] for q in QUALITIES
    )
    assert exact.moved_gib_per_picture > 2
    assert (near.job["bands"], near.job["tile"]) == ("fast", None)
    assert near.moved_gib_per_picture == 0


@pytest.mark.slow  # 4 to 60 s each: 89 and 41 budgets, and the traces of three sizes
@pytest.mark.parametrize("quality", QUALITIES)
@pytest.mark.parametrize("machine", [GENERIC, FAST], ids=["generic", "fast"])
@pytest.mark.parametrize("side", [512, 1024, 1536])
@pytest.mark.parametrize("model", ["random:sdxl", "random:sdxl-fp16vae"])
def test_over_all_budgets(model: str, side: int, machine: Machine, quality: str) -> None:
    assert _check(_plans(model, side, _steps(2, 24, 0.25), machine, quality), quality) == 0
    whole = _plans(model, side, _steps(2, 12, 0.25), machine, quality, fused=False)
    _check(whole, quality, WHOLE)
