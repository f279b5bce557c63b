"""Reversible patches of diffusers and transformers models onto the kernels of `sdx_kernels`.

It knows the host libraries' classes; it plans nothing and moves nothing, and says nothing but, in
one line, what a host lacks.
"""

from contextlib import suppress
from typing import Any

from sdx_kernels.ops.attention_names import allowed_by
from sdx_kernels.target import triton_status
from sdx_patches import compat, families, vae
from sdx_patches.report import Layer
from sdx_patches.session import (
    EVERYONE,
    Op,
    PatchSession,
    Settings,
    components,
    is_patched,
    release_all,
    site_of,
)

__all__ = ["EVERYONE", "Layer", "PatchSession", "fused", "layers", "owners", "patch", "restore"]


def patch(root: Any, *, owner: str, attention_op: Op = None, fused: bool = True) -> PatchSession:
    """Route the attention of a pipeline or model through our op; exact, and undone by `restore`.

    Either every layer that can be patched is, or, if anything raises, none. A second call by the
    same owner counts once and its arguments hold; it also takes over from an option such as
    attention slicing that was switched on in between.

    Args:
        root: a diffusers pipeline or an `nn.Module`.
        owner: name under which `restore` gives it back; several owners may share a model.
        attention_op: None or "auto", "torch", or the name of an implementation or an xFormers
            operator, which then must be able to serve every call.
        fused: whether fused kernels may replace more than attention: an AutoencoderKL then decodes
            and encodes in bands of rows, its norms fused with what comes before and after them.

    Returns:
        The session; as a context manager it restores at the end of the block.

    Raises:
        TypeError: `root` is neither a pipeline nor a module.
        InvalidInputs: (a ValueError) no implementation is called `attention_op`.
        ValueError: `owner` is empty.
    """
    allowed_by(attention_op)  # raises here, not in the middle of a picture
    triton_status()  # asked here, because torch.compile(fullgraph=True) cannot import
    compat.warn_once()
    session = PatchSession(root, owner, Settings(attention_op, fused))
    with session.applying():
        families.apply(root, session)
    return session


def restore(root: Any, *, owner: str) -> None:
    """Give back what `owner` patched on `root`: the very objects that were there before.

    A model stays patched until its last owner has restored it. Nothing happens where this owner
    has patched nothing. A copy of a patched model belongs to nobody in particular, so any owner's
    call restores it.

    Args:
        root: the pipeline or module given to `patch`, or another that shares its models.
        owner: the name given to `patch`; `EVERYONE` stands for all owners.
    """
    try:
        release_all(root, owner)
    finally:
        families.clear(root)


def owners(root: Any) -> set[str]:
    """Everybody who has patched a part of `root` and has not restored it."""
    found: set[str] = set()
    for component in components(root).values():
        # a part that cannot be walked now was patched by nobody, and must not keep the others
        with suppress(Exception):
            for module in component.modules():
                site = site_of(module)
                found.update(() if site is None else site.owners)
    return found


def layers(root: Any) -> list[Layer]:
    """Every attention layer of `root`, patched or not, with what serves it and why."""
    return list(families.describe(root))


def fused(root: Any) -> dict[str, str]:
    """By component, how each patched AutoencoderKL decodes and encodes now, and why."""
    found: dict[str, Any] = dict(components(root))
    return {
        name: vae.says(component)
        for name, component in found.items()
        if type(component).__name__ == "AutoencoderKL" and is_patched(component.decoder)
    }
