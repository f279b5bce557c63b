"""Holds launches against the tuning tables: what no table has for its inputs is refused.

It knows the keys by which launchers remember a step, and the tables; not one kernel.
"""

import functools
from dataclasses import replace
from typing import Any

from sdx_kernels.target import Target
from sdx_kernels.tuning import (
    attention,
    attention_bwd,
    attention_short,
    attention_tma,
    attention_tma_bwd,
    attention_wide,
)

__all__ = ["OWN", "hold_to_tables"]

#: the source of a tile that a test hands to a launcher itself: no table is asked then
OWN = "test"

#: whose tables a card's launches come from; an interpreted launch may have those of any card
CARDS = (80, 86, 89, 90, 100, 120)

#: keys do not decide a step's key, and tables have steps for few of them and for many
KEYS = (1, 16, 32, 64, 77, 96, 97, 128, 154, 160, 257, 512, 1024, 2048, 4096, 16384)


def hold_to_tables(key: tuple[object, ...], config: Any) -> None:
    """Raises where no table has this configuration for the inputs that the key stands for."""
    if config.source == OWN or _is_of_table(key[:-1], config):
        return
    raise AssertionError(f"a launch outside the tables: {config} for {key[:-1]}")


@functools.cache
def _is_of_table(facts: tuple[object, ...], config: Any) -> bool:
    card = next(fact for fact in facts if isinstance(fact, Target))
    if card.capability is None:
        cards = (replace(card, capability=divmod(number, 10)) for number in CARDS)
        return any(config in _tables(one, card, facts, config) for one in cards)
    return config in _tables(card, card, facts, config)


def _tables(card: Target, known: Target, facts: tuple[object, ...], config: Any) -> list[Any]:
    rest = list(facts[facts.index(known) + 1 :])
    if isinstance(config, attention_tma.TmaConfig):
        return _tma(card, rest)
    if isinstance(config, attention_short.ShortConfig):
        return _short(card, rest)
    if isinstance(config, attention_tma_bwd.TmaGradConfig):
        return _tma_backward(card, str(facts[1]), rest)
    if not isinstance(config, attention.AttentionConfig):
        return _wide(card, rest)
    if facts[0] in attention_bwd.KERNELS:
        return _backward(card, str(facts[0]), rest)
    return _forward(card, rest)


def _forward(card: Target, rest: list[Any]) -> list[Any]:
    head_dim, value_dim, dtype, bias, _, key_mask, lower, upper, packed, dropout = rest
    return [
        config
        for keys in KEYS
        for config in attention.ladder_for(
            card.capability,
            head_dim,
            value_dim,
            dtype,
            keys,
            bias is not None,
            lower or upper,
            card.shared_memory_bytes or None,
            packed=packed,
            key_mask=key_mask,
            dropout=dropout,
        )
    ]


def _backward(card: Target, kernel: str, rest: list[Any]) -> list[Any]:
    _, head_dim, value_dim, dtype, *kinds = rest
    found: list[Any] = []
    if not kinds:
        # the row facts that go before the gradients through descriptors
        ladder = attention_tma_bwd.ladder_for_tma_bwd(card.capability, head_dim, value_dim, dtype)
        return found if ladder is None else list(ladder.rows)
    bias, left, right, key_mask, packed, dropout = kinds
    for bias_grad in (False, True):
        ladders = attention_bwd.backward_ladder_for(
            card.capability,
            head_dim,
            value_dim,
            dtype,
            biased=bias is not None,
            masked=left or right or key_mask or packed,
            dropout=dropout,
            bias_grad=bias_grad,
            shared_memory_bytes=card.shared_memory_bytes or None,
        )
        found += [] if ladders is None else getattr(ladders, kernel)
    return found


def _tma(card: Target, rest: list[Any]) -> list[Any]:
    dtype, _, head_dim, value_dim = rest
    dims = card.capability, head_dim, value_dim, dtype
    found: list[Any] = []
    for keys in KEYS:
        found += attention_tma.ladder_for_tma(*dims, keys, card.shared_memory_bytes or None)
        found += attention_tma.candidates(*dims, keys).values()
    return found


def _tma_backward(card: Target, kernel: str, rest: list[Any]) -> list[Any]:
    head_dim, value_dim, dtype = rest
    dims = card.capability, head_dim, value_dim, dtype
    shipped = attention_tma_bwd.ladder_for_tma_bwd(*dims, card.shared_memory_bytes or None)
    ladders = [shipped, *attention_tma_bwd.candidates(*dims).values()]
    return [config for ladder in ladders if ladder for config in getattr(ladder, kernel)]


def _short(card: Target, rest: list[Any]) -> list[Any]:
    dtype, bias, _, head_dim, value_dim = rest
    dims = card.capability, head_dim, value_dim, dtype
    found: list[Any] = []
    for keys in range(1, attention_short.MAX_SHORT_KEYS + 1):
        for queries in (1, 64, 1024, 1 << 20):
            found += attention_short.ladder_for_short(
                *dims, keys, bias is not None, card.shared_memory_bytes or None, queries=queries
            )
        found += attention_short.candidates(*dims, keys).values()
    return found


def _wide(card: Target, rest: list[Any]) -> list[Any]:
    (kind,) = rest
    arguments = card.capability, kind, card.shared_memory_bytes or None
    return [
        *attention_wide.wide_ladder_for(*arguments),
        *attention_wide.wide_grad_ladder_for(*arguments),
        *attention_wide.candidates(*arguments[:2]).values(),
        *attention_wide.grad_candidates(*arguments[:2]).values(),
    ]
