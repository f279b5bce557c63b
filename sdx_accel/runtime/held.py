"""Makes a pipeline and its models report phases and keep still, by swapping their class.

An instance's `__call__` is ignored by Python and half the pipelines check no sizes, so the object
gets a subclass of its own class with the same name and module; undo puts the very class back.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map

from sdx_accel.errors import PlacementError
from sdx_accel.runtime.executor import Executor
from sdx_accel.runtime.fp32_decode import decode_in_fp32
from sdx_accel.runtime.prompt_cache import PromptCache
from sdx_accel.runtime.recovery import exceeded, recovering
from sdx_accel.runtime.text_kv_phase import TextKVPhase

__all__ = ["hold_models", "hold_pipeline", "is_held", "let_go"]

_STATE = "_sdx_held"
# where a pipeline keeps its budget session; a copy must not share it: its undo is the original's
SESSION = "_sdx_budget"
# each changes or adds weights: they run with everything on the host, then the plan is made anew
_ADAPTER_METHODS = (
    "fuse_lora",
    "load_ip_adapter",
    "load_lora_weights",
    "load_textual_inversion",
    "unfuse_lora",
    "unload_ip_adapter",
    "unload_lora_weights",
    "unload_textual_inversion",
)
_MODEL_ADAPTER_METHODS = (
    "add_adapter",
    "delete_adapters",
    "fuse_lora",
    "load_attn_procs",
    "load_lora_adapter",
    "unfuse_lora",
    "unload_lora",
)
_OFFLOAD_METHODS = (
    "enable_group_offload",
    "enable_model_cpu_offload",
    "enable_sequential_cpu_offload",
)


class _LikeBase(type):
    """Held classes equal the class they stand for: `from_pipe` looks types up with `in`."""

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.__bases__[0]

    def __hash__(cls) -> int:
        return hash(cls.__bases__[0])


def _swap_class(target: Any, state: Any, members: Mapping[str, Any]) -> None:
    base = type(target)

    def reduce(self: Any, protocol: Any) -> Any:
        # pickles and deep copies hold the stock object: a plan belongs to this one and this card.
        # A tensor is pickled with its whole storage, and units share theirs: 128 MiB for each of
        # a thousand tensors
        self.__dict__[_STATE].dissolve()
        state = object.__reduce_ex__(self, 2)[2]
        return _new, (base,), _stock_state(state)

    namespace = {
        **members,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": reduce,
    }
    meta = _meta_of(type(base))
    object.__setattr__(target, "__class__", meta(base.__name__, (base,), namespace))
    target.__dict__[_STATE] = state


def _meta_of(metaclass: type) -> Any:
    return _LikeBase if metaclass is type else type("_LikeBase", (_LikeBase, metaclass), {})


def _new(cls: type) -> Any:
    """A bare instance; `copyreg`'s own would insist on the swapped class."""
    return object.__new__(cls)


def _stock_state(state: Any) -> Any:
    if not isinstance(state, dict):
        return state
    state = {key: value for key, value in state.items() if key not in (_STATE, SESSION)}
    hooks = state.get("_forward_pre_hooks", {})
    ours = [key for key, hook in hooks.items() if isinstance(hook, _BeginPhase)]
    for table in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"):
        if table in state:
            kept = ((k, v) for k, v in state[table].items() if k not in ours)
            state[table] = type(state[table])(kept)
    return state


def is_held(target: Any) -> bool:
    """Whether `hold_pipeline` or `hold_models` is in force on one object."""
    return _STATE in target.__dict__


def let_go(target: Any) -> None:
    """Undo `hold_pipeline` or `hold_models` on one object; nothing happens if it is not held."""
    if _STATE in target.__dict__:
        object.__setattr__(target, "__class__", type(target).__bases__[0])
        del target.__dict__[_STATE]


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _refuse_moves(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    wanted = [kwargs["device"]] if kwargs.get("device") is not None else []
    wanted += [a for a in args if isinstance(a, (str, int, torch.device))]
    if wanted:
        raise PlacementError(
            f"{name} is held to a VRAM budget, which decides where its weights lie; "
            f"call disable_xattn() before .to({str(wanted[0])!r})"
        )


def hold_models(executor: Executor) -> Callable[[], None]:
    """Make each model say when its phase begins; returns the undo."""
    handles = []
    executor.retries = []
    for name, module in executor.modules.items():
        members: dict[str, Any] = {
            "device": property(lambda self: self.__dict__[_STATE].device),
            "to": _make_to(name, type(module)),
            "_apply": _make_apply(executor, type(module)),
            "cpu": _make_move(name, "cpu"),
            "cuda": _make_move(name, "cuda"),
        }
        for method in _MODEL_ADAPTER_METHODS:
            if hasattr(type(module), method):
                members[method] = _make_adapter_method(executor, getattr(type(module), method))
        if name == "vae":
            members["encode"] = _make_coder("encode", type(module))
            members["decode"] = _make_coder("decode", type(module))
        else:
            members["__call__"] = _make_call(executor, name, type(module))
            hook = _BeginPhase(executor, name, _phase_of(name))
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        _swap_class(module, executor, members)

    text_kv = TextKVPhase(executor)
    executor.on_call.append(text_kv)

    def undo() -> None:
        text_kv.close()
        executor.on_call.remove(text_kv)
        for handle in handles:
            handle.remove()
        for module in executor.modules.values():
            let_go(module)

    return undo


def _phase_of(name: str) -> str:
    if name.startswith("text_encoder") or name == "image_encoder":
        return "text"
    if name.startswith("adapter"):
        return "encode"
    return {"safety_checker": "decode", "refiner": "refine"}.get(name, "denoise")


def _make_call(executor: Executor, name: str, base: Any) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return base.__call__(self, *args, **kwargs)
        return recovering(
            executor, name, _phase_of(name), lambda: base.__call__(self, *args, **kwargs)
        )

    return call


def _make_apply(executor: Executor, base: Any) -> Callable[..., Any]:
    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        # .half(), .to(dtype) and the like give new weights: the copies on the host are outdated
        if not executor.casting:
            executor.bring_home()
        return base._apply(self, *args, **kwargs)

    return apply


class _BeginPhase:
    """Forward pre-hook: the phase of `name` begins, its weights and inputs are on the device."""

    def __init__(self, executor: Executor, name: str, phase: str) -> None:
        self.executor, self.name, self.phase = executor, name, phase

    def __reduce__(self) -> Any:
        # handles of other hooks carry the whole table into copies: ours is nothing there
        return type(None), ()

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        executor = self.executor
        for tell in executor.on_call:
            tell(self.name, module, args, kwargs)
        # a step of a loop that runs already: everything is in place
        if executor.phase == self.phase and self.phase in ("denoise", "refine"):
            return None
        executor.enter(self.phase)
        executor.ensure(self.name)
        return tree_map(lambda value: _moved(value, executor.device), (args, kwargs))


def _make_to(name: str, base: type) -> Callable[..., Any]:
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        executor: Executor = self.__dict__[_STATE]
        if executor.adapting:
            # diffusers puts the model back where it says it is: only the dtype counts
            args = tuple(value for value in args if isinstance(value, torch.dtype))
            kwargs = {key: value for key, value in kwargs.items() if key != "device"}
        _refuse_moves(name, args, kwargs)
        dtypes = [v for v in (*args, kwargs.get("dtype")) if isinstance(v, torch.dtype)]
        if name != "vae" or not dtypes:
            return base.to(self, *args, **kwargs)  # type: ignore[attr-defined]
        # SDXL casts its VAE to fp32 around encode and decode: on the card, inside the phase
        executor.uncast(name)
        if dtypes[0] != next(self.parameters()).dtype:
            phase = _coder_phase(executor)

            def cast() -> None:
                executor.enter(phase)
                executor.cast(name, dtypes[0])

            recovering(executor, name, phase, cast)
        return self

    return to


def _make_move(name: str, method: str) -> Callable[..., Any]:
    """`.cpu()` and `.cuda()`, which go past `.to`."""

    def move(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.__dict__[_STATE].adapting:
            return self
        _refuse_moves(name, (method,), {})

    return move


def _coder_phase(executor: Executor) -> str:
    planned = executor.plan is not None and executor.plan.phase("encode") is not None
    return "encode" if planned and executor.phase in (None, "text", "encode") else "decode"


def _make_coder(phase: str, base: type) -> Callable[..., Any]:
    def code(self: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        executor: Executor = self.__dict__[_STATE]
        dtype = next(self.parameters()).dtype

        def once() -> Any:
            executor.enter(phase)
            if next(self.parameters()).dtype != dtype:
                # cast by the pipeline, and back to the host's copy to make room for a new plan
                executor.cast("vae", dtype)
            executor.ensure("vae")
            return getattr(base, phase)(self, tensor.to(executor.device), *args, **kwargs)

        def on_cpu() -> Any:
            return decode_in_fp32(
                self,
                lambda latents: getattr(base, phase)(self, latents, *args, **kwargs),
                tensor,
                torch.device("cpu"),
                executor.device,
            )

        last = on_cpu if phase == "decode" else None
        return recovering(executor, "vae", phase, once, last)

    return code


def hold_pipeline(
    pipe: Any,
    executor: Executor,
    before_call: Callable[[tuple[Any, ...], dict[str, Any]], None],
    after_call: Callable[[], None],
) -> None:
    """Plan before each call, refuse moves, and follow adapters; `let_go` is the undo.

    Args:
        pipe: a diffusers pipeline.
        executor: holds its models.
        before_call: gets the call's arguments before anything runs; it may refuse by raising.
        after_call: runs when a call has ended well and the last phase's books are closed.
    """
    base = type(pipe)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        before_call(args, kwargs)
        executor.retries = []
        try:
            result = base.__call__(self, *args, **kwargs)
        except torch.OutOfMemoryError as error:
            if executor.plan is None:
                raise
            raise exceeded(executor, error) from error
        finally:
            executor.finish()
        after_call()
        return result

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_moves("this pipeline", args, kwargs)
        return base.to(self, *args, **kwargs)

    members: dict[str, Any] = {
        "__call__": call,
        "to": to,
        "device": property(lambda self: executor.device),
        "_execution_device": property(lambda self: executor.device),
    }
    if hasattr(base, "encode_prompt"):
        members["encode_prompt"] = PromptCache(executor).wrap(base.encode_prompt)
    for name in _ADAPTER_METHODS:
        if hasattr(base, name):
            members[name] = _make_adapter_method(executor, getattr(base, name))
    for name in _OFFLOAD_METHODS:
        if hasattr(base, name):
            members[name] = _make_refusal(name)
    _swap_class(pipe, executor, members)


def _make_adapter_method(executor: Executor, method: Callable[..., Any]) -> Callable[..., Any]:
    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        executor.bring_home()
        executor.adapting = True
        try:
            return method(self, *args, **kwargs)
        finally:
            executor.adapting = False

    return changed


def _make_refusal(name: str) -> Callable[..., Any]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise PlacementError(
            f"this pipeline is held to a VRAM budget, which already decides where weights lie; "
            f"drop the call of {name}(), or call disable_xattn() first"
        )

    return refuse
