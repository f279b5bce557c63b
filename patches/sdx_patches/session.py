"""Who patched which module, with what settings, and how each patch is undone.

Knows torch modules and owners; must not know what any patch does or which host class it is for.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

__all__ = [
    "EVERYONE",
    "LOCK",
    "Op",
    "PatchSession",
    "Settings",
    "Site",
    "call_all",
    "components",
    "is_patched",
    "record",
    "release",
    "release_all",
    "settings_of",
    "site_of",
    "uncompiled",
]

#: The one attribute that a patched module carries; it is deleted by the last owner's `restore`.
#: On the module, and not in a table of ours, because it must follow deepcopy and pickle.
ATTRIBUTE = "_sdx"

#: Held while models are patched, restored, or swapped back by a hook: a second thread waits, and
#: never sees a model half patched. Not held while anything computes.
LOCK = threading.RLock()

#: By root and owner, every module that was claimed, in that order: a pipeline may have lost one of
#: them by the time that it is restored. Copies of a root start without an entry.
_CLAIMED: weakref.WeakKeyDictionary[Any, dict[str, weakref.WeakKeyDictionary[nn.Module, None]]] = (
    weakref.WeakKeyDictionary()
)

#: As an owner: whoever it was. A copy belongs to everyone, since the names of its owners are
#: those of the original's.
EVERYONE = "*"


#: What the attention op takes as `op`.
Op = str | type | tuple[type | None, type | None] | None


@dataclass(frozen=True, slots=True)
class Settings:
    """What an owner asked for.

    Args:
        attention_op: what the attention op takes as `op`: None or "auto", "torch", the name of an
            implementation, or an xFormers operator class or pair of them.
        fused: whether fused kernels may replace more than attention: the autoencoder's norms.
    """

    attention_op: Op = None
    fused: bool = True

    @property
    def requested(self) -> str:
        """The op's name for people: "auto" unless one was asked for."""
        op = self.attention_op[0] if isinstance(self.attention_op, tuple) else self.attention_op
        return op if isinstance(op, str) else str(getattr(op, "NAME", op or "auto"))


@dataclass
class Site:
    """Everything that we keep about one patched module.

    Args:
        owners: settings by owner, in the order of their last call; the last one holds. Replaced
            whole, never changed: another thread may be reading it.
        undo: what `restore` calls, last entry first; entries are picklable.
        stock: the host's object that ours stands in for, where there is one.
        watched: on a model's entry module, the attention modules that its hook looks after.
        running: implementation that served the last call, None before the first.
        reasons: what the other candidates of that call were refused for, by name.
        warned: whether the user was told that another option replaced ours.
    """

    owners: dict[str, Settings] = field(default_factory=dict)
    undo: list[Callable[[], None]] = field(default_factory=list)
    stock: Any = None
    watched: list[nn.Module] = field(default_factory=list)
    running: str | None = None
    reasons: Mapping[str, Sequence[str]] = field(default_factory=dict)
    warned: bool = False

    @property
    def settings(self) -> Settings:
        """The settings that hold: those of the last call."""
        return next(reversed(self.owners.values()), Settings())

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "owners": {EVERYONE: self.settings}}


def site_of(module: nn.Module) -> Site | None:
    """What we keep about `module`, or None where it is not patched."""
    return vars(module).get(ATTRIBUTE)


def is_patched(module: nn.Module) -> bool:
    """Whether anybody has patched `module`; for a forward, which may be traced."""
    return getattr(module, ATTRIBUTE, None) is not None


def settings_of(module: nn.Module) -> Settings:
    """The settings that hold for `module`; automatic selection where it is not patched."""
    # getattr, not vars(): this one is called in a forward, which may be traced
    site: Site | None = getattr(module, ATTRIBUTE, None)
    return Settings() if site is None else site.settings


def record(module: nn.Module, choice: Any) -> None:
    """Note which implementation has just served `module`.

    Args:
        module: the module whose forward is running.
        choice: what the op returned beside its output: `.name` and `.reasons`.
    """
    # a traced graph would run this once, while tracing, and never again
    if torch.compiler.is_compiling():
        return
    site = site_of(module)
    if site is not None:
        site.running, site.reasons = choice.name, choice.reasons


def uncompiled(module: nn.Module) -> nn.Module:
    """The model inside what `torch.compile(model)` returned; any other module itself.

    The wrapper passes attributes on to the model but keeps hooks of its own: a patch on it would
    be half here and half there.
    """
    parts: Any = module._modules
    # TorchScript has a mapping of its own there, without `get`
    inner = parts.get("_orig_mod") if isinstance(parts, dict) else None
    return module if inner is None else inner


def components(root: Any) -> dict[str, nn.Module]:
    """The modules of a pipeline by component name, or `{"": root}` for a module; never compiled.

    Args:
        root: a diffusers pipeline (anything with a `components` mapping) or an `nn.Module`.

    Raises:
        TypeError: `root` is neither.
    """
    if isinstance(root, nn.Module):
        return {"": uncompiled(root)}
    found = getattr(root, "components", None)
    if not isinstance(found, dict):
        raise TypeError(
            f"expected a diffusers pipeline or a torch.nn.Module, got {type(root).__name__}; "
            "pass the pipeline itself or one of its models"
        )
    models = {n: uncompiled(part) for n, part in found.items() if isinstance(part, nn.Module)}
    seen: dict[int, str] = {}
    for name, model in models.items():
        seen.setdefault(id(model), name)  # one model under two names is one model
    return {name: models[name] for name in seen.values()}


def release_all(root: Any, owner: str) -> None:
    """Take `owner` off every module of `root`; a model before its parts.

    A model's undo entries may look at what is kept about its parts. Modules that the owner claimed
    through this very root, and that are in it no more, are given back too.

    Raises:
        TypeError: `root` is neither a pipeline nor a module.
        Exception: the first that an undo entry raised, after all of them were called.
    """
    with LOCK:
        models = components(root).values()
        failed = _call_each(partial(_release_model, model, owner) for model in models)
        claimed = _claimed_by(root)
        for name in [name for name in claimed if owner in (name, EVERYONE)]:
            modules = reversed(list(claimed.pop(name)))
            failed += _call_each(partial(release, module, owner) for module in modules)
        _raise_first(failed)


def _release_model(model: nn.Module, owner: str) -> None:
    call_all([partial(release, module, owner) for module in model.modules()])


def _claimed_by(root: Any) -> dict[str, weakref.WeakKeyDictionary[nn.Module, None]]:
    try:
        return _CLAIMED.setdefault(uncompiled(root) if isinstance(root, nn.Module) else root, {})
    except TypeError:  # a pipeline of somebody's own that compares by value has no hash
        return {}


def release(module: nn.Module, owner: str) -> None:
    """Take `owner` off `module`; the last one undoes the patch, last change first."""
    site = site_of(module)
    if site is None:
        return
    before = site.settings
    gone = (owner, EVERYONE)
    site.owners = {
        name: settings
        for name, settings in site.owners.items()
        if owner != EVERYONE and name not in gone
    }
    if not site.owners:
        _drop(module)
    elif site.settings != before:
        site.running, site.reasons = None, {}


class PatchSession:
    """One owner's patches on one root, applied whole or not at all.

    Use it as a context manager to undo them at the end of a block, or call `restore()`.

    Args:
        root: the pipeline or module that was patched.
        owner: who asked; a model stays patched until its last owner has restored it.
        settings: what was asked for.
    """

    def __init__(self, root: Any, owner: str, settings: Settings) -> None:
        if not owner or owner == EVERYONE:
            raise ValueError(f"an owner needs a name of its own, got {owner!r}")
        self.root = root
        self.owner = owner
        self.settings = settings
        self._modules: list[nn.Module] = []
        self._rollback: list[Callable[[], None]] = []

    def claim(self, module: nn.Module) -> Site:
        """Make this session's owner one of the owners of `module` and return its site."""
        site = site_of(module)
        if site is None:
            site = Site()
            setattr(module, ATTRIBUTE, site)
            self._rollback.append(partial(_drop, module))
        else:
            self._rollback.append(partial(vars(site).update, vars(site).copy()))
            site.undo = site.undo.copy()
        if site.settings != self.settings:
            site.running, site.reasons = None, {}
        others = {n: s for n, s in site.owners.items() if n not in (self.owner, EVERYONE)}
        site.owners = {**others, self.owner: self.settings}
        self._modules.append(module)
        mine = _claimed_by(self.root).setdefault(self.owner, weakref.WeakKeyDictionary())
        mine[module] = None
        return site

    def on_failure(self, undo: Callable[[], None]) -> None:
        """Have `undo` called if a later step of this session fails."""
        self._rollback.append(undo)

    @contextmanager
    def applying(self) -> Iterator[None]:
        """A block in which everything claimed is put back, last first, if anything raises."""
        with LOCK:
            try:
                yield
            except BaseException as error:
                for failed in self._put_back():
                    error.add_note(f"and a part could not be put back: {failed!r}")
                raise

    def rollback(self) -> None:
        """Undo this one call, as if it had never been made; for a caller whose next step failed.

        Unlike `restore`, it gives the same owner's earlier settings back. Nobody else may have
        patched these modules in between, and a second call does nothing.
        """
        with LOCK:
            _raise_first(self._put_back())

    def _put_back(self) -> list[Exception]:
        rollback, self._rollback = self._rollback, []
        self._modules.clear()
        return _call_each(reversed(rollback))

    def restore(self) -> None:
        """Undo what this session did, on the very modules that it patched.

        Unlike `restore(root, owner=…)` it also reaches models that the pipeline no longer has.
        A second call does nothing.
        """
        with LOCK:
            self._rollback.clear()
            modules, self._modules = self._modules, []
            call_all(partial(release, m, self.owner) for m in reversed(modules))

    def __enter__(self) -> "PatchSession":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.restore()


def _drop(module: nn.Module) -> None:
    site = site_of(module)
    if site is None:
        return
    undo, site.undo = site.undo, []
    failed = _call_each(reversed(undo))
    delattr(module, ATTRIBUTE)
    _raise_first(failed)


def _call_each(calls: Iterable[Callable[[], None]]) -> list[Exception]:
    """Call them all, whatever one of them raises: half an undo would be worse than none."""
    failed = []
    for call in calls:
        try:
            call()
        except Exception as error:
            failed.append(error)
    return failed


def call_all(calls: Iterable[Callable[[], None]]) -> None:
    """Call them all, and only then raise the first error of any."""
    _raise_first(_call_each(calls))


def _raise_first(failed: list[Exception]) -> None:
    if failed:
        raise failed[0]
