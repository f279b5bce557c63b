"""Which host classes get which patch: the tables, and the walk that applies them."""

from sdx_patches.families.walk import apply, clear, describe

__all__ = ["apply", "clear", "describe"]
