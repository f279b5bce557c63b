"""sdx_accel: fast attention and a held VRAM budget for diffusers pipelines."""

__version__ = "0.1.0.dev0"
