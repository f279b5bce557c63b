"""The shapes that `bench --tune` times, and for which lengths each of them speaks.

Self-attention of SDXL and SD 1.5 at 512² to 1024², cross-attention to a prompt and to the tokens of
an IP-Adapter, the VAE's single head, transformers, AnimateDiff's frames. Causal text encoders are
not here: torch's kernels are never chosen with a mask, so there is nothing to choose between.
"""

from dataclasses import dataclass

from sdx_kernels.tuning.measured_file import MOST_LENGTH

__all__ = ["CASES", "TINY", "Case"]

#: bounds of lengths, each around the one that is timed
_FEW, _TILES, _TEXT, _IMAGE = (1, 8), (9, 32), (33, 96), (193, 320)
_INNERMOST, _INNER, _OUTER = (128, 511), (512, 2047), (2048, MOST_LENGTH)
_UP_TO_8191, _FROM_8192 = (2048, 8191), (8192, MOST_LENGTH)
_ANY = (512, MOST_LENGTH)


@dataclass(frozen=True)
class Case:
    """One shape class.

    Attributes:
        name: lower case letters, digits and hyphens.
        batch, queries, keys, heads, head_dim: what is timed.
        for_queries, for_keys: inclusive bounds of the lengths that it then holds for.
    """

    name: str
    batch: int
    queries: int
    keys: int
    heads: int
    head_dim: int
    for_queries: tuple[int, int]
    for_keys: tuple[int, int]


#: what most pictures spend most time in comes first: a slow machine may not reach the end
CASES = (
    Case("sdxl-self-4096", 2, 4096, 4096, 10, 64, _OUTER, _OUTER),
    Case("sdxl-self-1024", 2, 1024, 1024, 20, 64, _INNER, _INNER),
    Case("sdxl-cross-4096", 2, 4096, 77, 10, 64, _OUTER, _TEXT),
    Case("sdxl-cross-1024", 2, 1024, 77, 20, 64, _INNER, _TEXT),
    Case("vae-16384", 1, 16384, 16384, 1, 512, _FROM_8192, _FROM_8192),
    Case("sd15-self-4096", 2, 4096, 4096, 8, 40, _OUTER, _OUTER),
    Case("sd15-self-1024", 2, 1024, 1024, 8, 80, _INNER, _INNER),
    Case("sd15-self-256", 2, 256, 256, 8, 160, _INNERMOST, _INNERMOST),
    Case("sd15-cross-4096", 2, 4096, 77, 8, 40, _OUTER, _TEXT),
    Case("sd15-cross-1024", 2, 1024, 77, 8, 80, _INNER, _TEXT),
    Case("sd15-cross-256", 2, 256, 77, 8, 160, _INNERMOST, _TEXT),
    Case("vae-4096", 1, 4096, 4096, 1, 512, _UP_TO_8191, _UP_TO_8191),
    Case("dit-4608-d128", 1, 4608, 4608, 24, 128, _OUTER, _OUTER),
    Case("dit-1536-d128", 1, 1536, 1536, 24, 128, _INNER, _INNER),
    Case("sdxl-self-256", 2, 256, 256, 20, 64, _INNERMOST, _INNERMOST),
    Case("sd15-self-1024-d40", 2, 1024, 1024, 8, 40, _INNER, _INNER),
    Case("sd15-self-4096-d80", 2, 4096, 4096, 8, 80, _OUTER, _OUTER),
    Case("sd15-self-1024-d160", 2, 1024, 1024, 8, 160, _INNER, _INNER),
    Case("sdxl-ip-4", 2, 4096, 4, 10, 64, _ANY, _FEW),
    Case("sdxl-ip-16", 2, 4096, 16, 10, 64, _ANY, _TILES),
    Case("sdxl-ip-257", 2, 4096, 257, 10, 64, _ANY, _IMAGE),
    Case("sd15-ip-4", 2, 4096, 4, 8, 40, _ANY, _FEW),
    Case("sd15-ip-16", 2, 4096, 16, 8, 40, _ANY, _TILES),
    Case("sd15-ip-4-d80", 2, 1024, 4, 8, 80, _ANY, _FEW),
    Case("sd15-ip-16-d80", 2, 1024, 16, 8, 80, _ANY, _TILES),
    Case("animatediff-frames", 2048, 16, 16, 8, 40, _TILES, _TILES),
)

#: for the dry run
TINY = (
    Case("tiny-self", 1, 64, 64, 2, 16, (33, 128), (33, 128)),
    Case("tiny-cross", 1, 64, 7, 2, 16, (33, 128), (1, 32)),
)
