"""Triton kernels with their launchers, and their ahead-of-time check; imported lazily."""
