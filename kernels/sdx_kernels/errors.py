"""Every exception the kernels raise on purpose; knows nothing but Python.

KernelError
├── UnsupportedInputs (NotImplementedError)   valid inputs that no implementation can take
├── InvalidInputs (ValueError)                inputs that no implementation could ever take,
│                                             or an explicitly chosen one that cannot
└── LaunchRefused (RuntimeError)              a launch that no tile size fits; dispatch goes on
"""

__all__ = ["InvalidInputs", "KernelError", "LaunchRefused", "UnsupportedInputs"]


class KernelError(Exception):
    """Base of all errors raised on purpose by the kernels."""


class UnsupportedInputs(KernelError, NotImplementedError):
    """No implementation takes these inputs; the message lists each one's reasons."""


class InvalidInputs(KernelError, ValueError):
    """Shapes, dtypes, devices or an explicit choice that can never work; says what to change."""


class LaunchRefused(KernelError, RuntimeError):
    """The driver refused every launch configuration of a kernel for lack of resources.

    Attributes:
        of_tensors: it was these tensors' strides or addresses instead, which others of equal
            shapes need not have.
    """

    of_tensors = False
