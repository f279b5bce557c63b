"""Planning arithmetic: bytes in, placement out. Knows no torch and no model class."""

from sdx_accel.budget.machine import Machine
from sdx_accel.budget.plan import Phase, Plan, StreamPlan
from sdx_accel.budget.profile import Component, JobProfile, PhaseProfile, StreamUnit, Unit
from sdx_accel.budget.search import make_plan
from sdx_accel.budget.units import GIB, MIB, VramRequest, parse_vram

__all__ = [
    "GIB",
    "MIB",
    "Component",
    "JobProfile",
    "Machine",
    "Phase",
    "PhaseProfile",
    "Plan",
    "StreamPlan",
    "StreamUnit",
    "Unit",
    "VramRequest",
    "make_plan",
    "parse_vram",
]
