"""What must be settled before any other module is imported."""

import os
import sys


def _selects_gpu(arguments: list[str]) -> bool:
    """Whether `-m EXPRESSION` asks for the GPU tests, which compile natively."""
    pairs = zip(arguments, [*arguments[1:], ""], strict=True)
    expressions = [after if flag == "-m" else flag[2:] for flag, after in pairs if flag[:2] == "-m"]
    return any("gpu" in words and "not gpu" not in words for words in expressions)


# Triton reads the variable while it is imported, and diffusers imports Triton: a hook or a fixture
# would come after the conftest files that import diffusers
if not _selects_gpu(sys.argv[1:]):
    os.environ["TRITON_INTERPRET"] = "1"
