"""Predicted peaks of decodes in bands of rows against the driver's count on a card.

An H200 with torch 2.11 and diffusers 0.42.1, fp16, one picture, everything resident: the rows of
12 GiB of `python -m sdx_accel.bench.streaming` (`--sizes 1024`, `--kind controlnet --sizes 1024`
and `--sizes 512,1536`, four steps), whose peak is that of the decode.
"""

import pytest

from sdx_accel.budget.machine import Machine
from sdx_accel.budget.plan import Plan
from sdx_accel.budget.search import LOOSE_BYTES, LOOSE_SHARE, SLACK_BYTES, make_plan
from sdx_accel.budget.units import GIB, MIB
from sdx_accel.runtime.architectures import architecture
from sdx_accel.runtime.controlnets import with_controlnets
from sdx_accel.runtime.profiler import Job, profile_job


def _plan(spec: str, size: int, budget: float, non_torch: int, bands: str | None, net: str) -> Plan:
    description = architecture(spec)
    if net:
        description = with_controlnets(description, [net], "text")
    job = Job(size, size, bands=bands, text_kv=True)
    profile = profile_job(description, job, dict.fromkeys(description.components, "float16"))
    card = Machine(
        "H200", 150_109_880_320, 150_088_056_832, non_torch, 54e9, 32 * MIB, "measured", 230e12
    )
    return make_plan(profile, card, round(budget * GIB))


@pytest.mark.parametrize(
    ("spec", "net", "size", "budget", "non_torch", "measured"),
    [
        ("random:sdxl-fp16vae", "", 512, 12, 872_415_744, 7.83551025390625),
        ("random:sdxl-fp16vae", "", 1024, 12, 872_415_744, 8.77886962890625),
        ("random:sdxl-fp16vae", "", 1536, 12, 907_018_752, 10.09332275390625),
        ("random:sdxl-fp16vae", "random:controlnet", 1024, 12, 872_415_744, 11.14215087890625),
        # noted with two decimals
        ("random:sd15", "random:controlnet", 512, 24, 792_723_456, 3.98),
    ],
)
def test_a_decode_that_nothing_presses_is_not_predicted_too_low(
    spec, net, size, budget, non_torch, measured
):
    decode = _plan(spec, size, budget, non_torch, "fast", net).phase("decode")
    assert measured <= decode.predicted_peak_gib <= 1.03 * measured


def test_a_decode_that_the_cap_presses_is_predicted_at_the_cap():
    plan = _plan("random:sdxl-fp16vae", 1024, 8, 872_415_744, "fast", "")
    # 7.92926 GiB were measured
    assert plan.phase("decode").predicted_peak_gib == 8 - SLACK_BYTES / GIB


@pytest.mark.parametrize(("bands", "more"), [("fast", True), ("low", True), (None, False)])
def test_only_decodes_in_bands_have_the_allowance(bands, more):
    description = architecture("random:sdxl-fp16vae")
    job = Job(512, 512, bands=bands)
    profile = profile_job(description, job, dict.fromkeys(description.components, "float16"))
    plan = make_plan(profile, Machine.generic(), 24 * GIB)
    for phase in profile.phases:
        reserved = phase.reserved_bytes
        loose = min(round(reserved * LOOSE_SHARE), LOOSE_BYTES)
        expected = reserved + (loose if more and phase.name == "decode" else 0)
        assert plan.phase(phase.name).activations_gib == pytest.approx(expected / GIB, abs=1e-4)
