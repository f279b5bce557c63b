"""Triton's tensor descriptors where it has them: from 3.4 on, and torch 2.7 comes with 3.3.

Without them this is a class that nothing is an instance of, and dispatch refuses their kernels.
"""

from typing import TYPE_CHECKING

__all__ = ["TensorDescriptor"]

if TYPE_CHECKING:
    from triton.tools.tensor_descriptor import TensorDescriptor
else:
    try:
        from triton.tools.tensor_descriptor import TensorDescriptor
    except ImportError:

        class TensorDescriptor:
            """None of these are ever made."""
