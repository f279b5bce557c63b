"""xFormers' names, argument order, layouts and exceptions: `import sdx_accel.ops as xops`."""

from sdx_kernels.ops import *  # noqa: F403
from sdx_kernels.ops import __all__ as __all__
