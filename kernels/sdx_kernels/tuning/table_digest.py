"""What names the tuning tables of an installation: equal digests launch the same configurations."""

import hashlib

from sdx_kernels.tuning.measured_order import in_use
from sdx_kernels.tuning.shipped_digest import shipped_digest

__all__ = ["table_digest"]


def table_digest() -> str:
    """Twelve hex digits of the shipped tables, and of the orders measured on this machine's cards.

    Without a measured order in use, as on every machine without a GPU, the shipped tables' own.
    """
    measured = sorted({digest for _, digest in in_use()})
    if not measured:
        return shipped_digest()
    return hashlib.sha256("\n".join((shipped_digest(), *measured)).encode()).hexdigest()[:12]
