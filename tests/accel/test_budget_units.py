"""The meaning of --vram."""

import pytest

from sdx_accel.budget.units import GIB, MIB, about, ceil_gib, parse_vram, say_seconds, say_size
from sdx_accel.errors import RefusedError


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("8", "absolute", 8),
        (6.8, "absolute", 6.8),
        ("8GiB", "absolute", 8),
        ("8 GB", "absolute", 8),
        (" 7.5g ", "absolute", 7.5),
        ("auto", "auto", 0),
        ("AUTO", "auto", 0),
        ("80%", "share", 0.8),
        ("-1", "leave", 1),
        (-0.5, "leave", 0.5),
    ],
)
def test_forms(text, kind, value):
    request = parse_vram(text)
    assert (request.kind, request.value) == (kind, pytest.approx(value))


@pytest.mark.parametrize(
    "text", ["", "lots", "0", "0%", "120%", "nan", "inf", "1e9999", "8MiB", "--3"]
)
def test_nonsense_is_refused_with_the_forms(text):
    with pytest.raises(RefusedError, match="80%"):
        parse_vram(text)


def test_resolution_on_a_card():
    total, free = 8 * GIB, 7 * GIB
    assert parse_vram(6).resolve(total, free) == (6 * GIB, None)
    assert parse_vram("-1").resolve(total, free)[0] == 6 * GIB
    assert parse_vram("50%").resolve(total, free)[0] == 4 * GIB
    assert parse_vram("auto").resolve(total, free)[0] == free - 512 * MIB


def test_a_desktop_that_holds_a_gibibyte_lowers_the_budget_and_is_named():
    budget, note = parse_vram(8).resolve(8 * GIB, 7 * GIB + 3 * MIB)
    assert budget == 7 * GIB
    assert note is not None
    assert "8.00 GiB asked" in note
    assert "7.00 GiB free" in note


def test_free_memory_is_rounded_down_so_that_plans_repeat():
    readings = {parse_vram(8).resolve(8 * GIB, 7 * GIB + jitter * MIB)[0] for jitter in (0, 5, 63)}
    assert readings == {7 * GIB}


@pytest.mark.parametrize("text", ["auto", "80%", "-1"])
def test_relative_budgets_need_a_card(text):
    with pytest.raises(RefusedError, match="GPU"):
        parse_vram(text).resolve(None, None)


def test_leaving_more_than_there_is_leaves_nothing():
    with pytest.raises(RefusedError, match="nothing"):
        parse_vram("-9").resolve(8 * GIB, 7 * GIB)


def test_ceil_never_rounds_down():
    assert ceil_gib(6.0 * GIB) == 6.0
    assert ceil_gib(6.0 * GIB + 1) == 6.05


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.0, "below 1 ms"),
        (0.00099, "below 1 ms"),
        (0.001, "1 ms"),
        (0.0714, "71.4 ms"),
        (0.1, "0.1 s"),
        (0.568703, "0.569 s"),
        (12.34, "12.3 s"),
    ],
)
def test_times_are_never_zero_for_people(seconds, said):
    assert say_seconds(seconds) == said
    assert about(seconds) == (said if said.startswith("below") else f"about {said}")


@pytest.mark.parametrize(
    ("gib", "said"),
    [(0.0, "0 MiB"), (0.0043, "4 MiB"), (0.0146, "0.01 GiB"), (6.314, "6.31 GiB")],
)
def test_small_sizes_are_mebibytes(gib, said):
    assert say_size(gib) == said
