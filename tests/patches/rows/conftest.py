"""The rows of the compatibility table: one pipeline class each, built from tiny random parts."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _global_noise() -> Iterator[None]:
    """Building a row seeds torch's global generator; leave it as it was."""
    kept = torch.get_rng_state()
    yield
    torch.set_rng_state(kept)
