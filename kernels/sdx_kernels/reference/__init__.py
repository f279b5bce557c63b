"""The equations in plain PyTorch: the truth that kernels are tested against, and the CPU path."""
