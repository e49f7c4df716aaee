"""Data parallelism in place: the module keeps its identity, and a hidden wrapper does the work."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from copyreg import _reconstructor  # type: ignore[attr-defined]
from functools import partialmethod, wraps
from threading import get_ident
from types import NoneType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.profiler import record_function
from torch.fx import GraphModule
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from tritonddp._arguments import check_flags
from tritonddp._torch import STOCK, cheap_record_function, is_profiled, traced_as
from tritonddp.compiled.forward import WRAPPER, replicated_in_one_graph, unless_traced
from tritonddp.state import DDPState
from tritonddp.wrapper import DistributedDataParallel

_Module = TypeVar("_Module", bound=nn.Module)
# Registration hooks of all modules, installed with the first replicated module.
_hooks: list[Any] = []
# Methods of the wrapper that a replicated module has too.
_METHODS = (
    "no_sync",
    "weighted",
    "join",
    "reduce_gradients",
    "check_sync",
    "metrics",
    "add_scalars",
    "reduced_scalars",
    "comm_state_dict",
    "load_comm_state_dict",
    "register_comm_hook",
    "finalize_backward",
    "request_stop",
    "should_stop",
)
_ATTRIBUTES = (
    "require_backward_grad_sync",
    "require_manual_backward_finalization",
    "should_finalize_after_backward",
)
# Attributes of the wrapper that scripts read, unless the module or its class defines them.
_READ = (
    *("reducer", "process_group", "device", "device_ids", "find_unused_parameters"),
    *("static_graph", "gradient_as_bucket_view", "broadcast_buffers"),
)


class _Behind:
    """Holds the hidden wrapper of a module. A copy or a pickle of it is ``None``.

    So copies are plain modules even if a class copies its own ``__dict__``, as parametrized modules
    do.
    """

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self.wrapper = wrapper

    def __reduce__(self) -> Any:
        return NoneType, ()


class ReplicatedModule:
    """Base class of replicated modules. It also gets methods and attributes of the wrapper."""

    @traced_as(replicated_in_one_graph)
    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module, and all that the wrapper does before and after its forward."""
        behind = self.__dict__.get(WRAPPER)
        wrapper: Any = None if behind is None else behind.wrapper
        # A slice of a module has no wrapper. A copied __dict__ has the wrapper of another module.
        is_own = wrapper is not None and wrapper._modules["module"] is self
        state = wrapper._ddp_state if is_own else None
        if state is None or state.call is None or get_ident() in state.running:  # recursive call
            return super().__call__(*inputs, **kwargs)  # type: ignore[misc]
        # The same as wrapper.forward(), inlined to save a call in each step.
        span = record_function if is_profiled() else cheap_record_function
        with span("DistributedDataParallel.forward"):
            inputs, kwargs = wrapper._pre_forward(*inputs, **kwargs)
            return wrapper._post_forward(wrapper._run_ddp_forward(*inputs, **kwargs))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Make copies and pickles plain modules: they belong to no process group."""
        reduced = super().__reduce_ex__(protocol)
        if not isinstance(reduced, tuple):
            return reduced
        make, arguments, *rest = reduced
        own, plain = type(self), _plain_class(type(self))
        if arguments == (own,):  # pickle requires that class; the result must not need tritonddp
            make, arguments = _reconstructor, (plain, object, None)
        arguments = tuple(plain if each is own else each for each in arguments)
        if rest and isinstance(rest[0], dict):
            rest[0] = {name: value for name, value in rest[0].items() if name != WRAPPER}
        return make, arguments, *rest

    @property
    def _ddp_state(self) -> DDPState:
        return ddp(self)._ddp_state

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Set whether following backwards are reduced, or accumulate gradients locally.

        :meth:`no_sync` sets the same flag in its context. The name is from FSDP2.

        Raises:
            TypeError: the value is neither true nor false.
        """
        check_flags({"requires_gradient_sync": requires_gradient_sync})
        ddp(self).require_backward_grad_sync = bool(requires_gradient_sync)


def _of_wrapper(name: str) -> Callable[..., Any]:
    @wraps(getattr(DistributedDataParallel, name))
    def method(module: nn.Module, /, *arguments: Any, **options: Any) -> Any:
        return getattr(ddp(module), name)(*arguments, **options)

    return method


def _attribute_of_wrapper(name: str) -> property:
    def read(module: nn.Module) -> Any:
        return getattr(ddp(module), name)

    def write(module: nn.Module, value: Any) -> None:
        setattr(ddp(module), name, value)

    return property(read, write)


class _ReadOfWrapper:
    """Reads an attribute of the wrapper. A non-data descriptor, so the module may set its own.

    A ``__getattr__`` would forward every missing name, and run for each access to a submodule.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, module: Any, _: type) -> Any:
        try:
            return type(module).__getattr__(module, self._name)  # the module's own, if any
        except AttributeError:
            return getattr(_wrapper_of(module), self._name)  # fails for a copy


for _name in _METHODS:
    setattr(ReplicatedModule, _name, _of_wrapper(_name))
for _name in _ATTRIBUTES:  # scripts set them; a plain attribute would have no effect
    setattr(ReplicatedModule, _name, _attribute_of_wrapper(_name))
# Names that the module itself must not define.
_ADDED = [name for name in vars(ReplicatedModule) if not name.startswith("__")]


def replicate(
    module: _Module,
    *,
    process_group: dist.ProcessGroup | None = None,
    device_mesh: Any = None,
    device_ids: Sequence[int | torch.device] | None = None,
    **options: Any,
) -> _Module:
    """Train ``module`` data-parallel in place, without a wrapper: it stays the same module.

    Its parameter names, ``state_dict()``, attributes and methods are unchanged. You may create
    the optimizer before or after this call. From now on, every ``backward()`` that reaches the
    parameters is reduced, no matter what was called: the module, another method, or a submodule.
    Inside ``module.no_sync()``, backwards are local. ``torch.autograd.grad`` returns local
    gradients, as without DDP. All ranks must run the same backwards: if only one rank runs a
    backward, for example for a probe, all ranks raise an error before anything is averaged. The
    error names the lines that call ``backward()`` on both ranks.

    A forward exchanges nothing, so a single rank may evaluate the module. All ranks receive the
    buffers of rank 0 at the end of each reduced backward. Calls of the module itself move inputs
    to ``device_ids``.

    The module's class becomes a subclass with the same name and these methods: ``no_sync``,
    ``set_requires_gradient_sync``, ``weighted``, ``join``, ``reduce_gradients``, ``check_sync``,
    ``metrics``, ``add_scalars``, ``reduced_scalars``, ``comm_state_dict``,
    ``load_comm_state_dict``, ``register_comm_hook``, ``finalize_backward``, ``should_stop`` and
    ``request_stop``. :func:`ddp` returns the wrapper. Copies and pickles are plain modules.

    Args:
        module: as for :class:`DistributedDataParallel`.
        process_group: as for :class:`DistributedDataParallel`.
        device_mesh: as for :class:`DistributedDataParallel`.
        device_ids: as for :class:`DistributedDataParallel`.
        options: other options of that class by keyword, for example ``compression="int8"``.

    Returns:
        ``module`` itself.

    Raises:
        TypeError: ``module`` is not a module, is a wrapper, or its class cannot have such a
            subclass (as with TorchScript); or an option is unknown.
        ValueError: the module has an attribute with the name of an added method; or the module, a
            part of it, or a module that contains it is already replicated or wrapped.
        NotImplementedError, RuntimeError: as :class:`DistributedDataParallel`.

    Example::

        net = nn.Linear(16, 4)
        assert tritonddp.replicate(net) is net
        loss_function(net(inputs), targets).backward()  # .grad holds the means over the ranks
    """
    kind = _checked(module)
    if options.get("mixed_precision") is not None:
        raise ValueError(
            "mixed_precision casts the parameters for a forward of the whole module, but a "
            "replicated module may be called in any way: use torch.autocast"
        )
    wrapper = DistributedDataParallel(
        module,
        process_group=process_group,
        device_mesh=device_mesh,
        device_ids=device_ids,
        **options,
    )
    object.__setattr__(module, "__class__", kind)
    module.__dict__[WRAPPER] = _Behind(wrapper)
    call = super(ReplicatedModule, module).__call__  # type: ignore[misc]
    wrapper._ddp_state.run_in_place(wrapper, call)
    if not _hooks:
        hook = unless_traced(_note_part)  # compiled forwards make modules, for example slices
        _hooks.append(register_module_module_registration_hook(hook))
        _hooks.append(register_module_parameter_registration_hook(hook))
    return module


def ddp(module: Any) -> DistributedDataParallel:
    """Return the underlying wrapper of a module that was passed to :func:`replicate`.

    The wrapper has all methods and attributes of :class:`DistributedDataParallel`. Calling it calls
    the module. If ``module`` is a wrapper, it is returned unchanged. Modules and wrappers compiled
    by ``torch.compile`` are accepted.

    Raises:
        TypeError: ``module`` is neither replicated nor a wrapper.

    Example::

        net = tritonddp.replicate(nn.Linear(16, 4))
        print(tritonddp.ddp(net).reducer.counters)  # launches, collectives and bytes so far
    """
    for found in (module, getattr(module, "_orig_mod", None)):
        wrapper = found if isinstance(found, DistributedDataParallel) else _wrapper_of(found)
        if wrapper is not None:
            return wrapper
    raise TypeError(
        f"{type(module).__name__} is not replicated: pass the module that was passed to "
        "tritonddp.replicate(), not a part or a copy of it"
    )


def _note_part(owner: nn.Module, _: str, part: nn.Module | nn.Parameter | None) -> None:
    """Watch for backwards of a new part, which may bypass the forward of the whole module."""
    for state in DDPState.all_live():
        if state.call is not None and part is not None and state.parameters.expects(owner, part):
            state.core.watch_others()


def _wrapper_of(module: Any) -> DistributedDataParallel | None:
    """Return the wrapper of this module; a copy of its ``__dict__`` has another module's."""
    behind: _Behind | None = getattr(module, "__dict__", {}).get(WRAPPER)
    is_own = behind is not None and behind.wrapper._modules["module"] is module
    return behind.wrapper if behind is not None and is_own else None


def _plain_class(kind: type) -> type:
    """Return the class that a replicated module had before."""
    return next(each for each in kind.__mro__[1:] if not issubclass(each, ReplicatedModule))


def _class_of(plain: type) -> type:
    """Return the subclass of ``plain`` for replicated modules, cached and of the same name."""
    kinds: list[type] = plain.__subclasses__()
    for kind in kinds:
        if kind.__bases__ == (ReplicatedModule, plain):
            return kind
    named: dict[str, Any] = {name: plain.__dict__[name] for name in ("__module__", "__doc__")}
    named |= {name: _ReadOfWrapper(name) for name in _READ if not hasattr(plain, name)}
    # These methods inspect the class of the module, and make or change one like it.
    for name in ("__deepcopy__", *(["recompile"] if issubclass(plain, GraphModule) else [])):
        if hasattr(plain, name):
            named[name] = partialmethod(_as_plain, getattr(plain, name))
    return type(plain)(plain.__name__, (ReplicatedModule, plain), named)


def _as_plain(module: nn.Module, method: Callable[..., Any], *arguments: Any) -> Any:
    """Call ``method`` of the class that the replicated ``module`` had before."""
    own = type(module)
    object.__setattr__(module, "__class__", _plain_class(own))
    try:
        return method(module, *arguments)
    finally:
        object.__setattr__(module, "__class__", own)


def _checked(module: Any) -> type:
    """Return the replicated class of ``module``. Raise if it cannot be replicated."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    name = type(module).__name__
    if isinstance(module, STOCK):
        raise TypeError(
            f"this {name} is a wrapper: replicate the module inside it instead, before wrapping"
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"{name} is a TorchScript module, whose class cannot be changed: wrap it with "
            "DistributedDataParallel instead"
        )
    _check_parts(module)
    plain = type(module)
    if issubclass(plain, ReplicatedModule):  # a part made by slicing
        return plain
    clashes = [each for each in _ADDED if _has(module, each)]
    if clashes:
        raise ValueError(
            f"{name} has attributes that methods of a replicated module would hide: "
            f"{', '.join(clashes)}. Rename them, or wrap the module with DistributedDataParallel "
            "instead"
        )
    try:
        kind = _class_of(plain)
        object.__setattr__(module, "__class__", kind)
        object.__setattr__(module, "__class__", plain)
    except TypeError as error:
        raise TypeError(
            f"the class of {name} cannot be changed ({error}): wrap the module with "
            "DistributedDataParallel instead"
        ) from error
    return kind


def _check_parts(module: nn.Module) -> None:
    """Raise a ValueError if the module, a part of it, or its parent is already wrapped."""
    if _other_use(module):
        gc.collect()  # a replicated module refers to itself through its wrapper
        if used := _other_use(module):
            raise ValueError(
                f"this {type(module).__name__} cannot be replicated: {used} already, so its "
                "gradients would be averaged twice. Replicate the whole model once"
            )


def _other_use(module: nn.Module) -> str:
    """Describe the wrapper that reduces parameters of the module; empty if there is none."""
    parts = set(module.modules())
    for state in DDPState.all_live():
        whole = state.parameters.module
        how = "wrapped" if state.call is None else "replicated"
        if whole in parts:
            name = next(name for name, each in module.named_modules() if each is whole)
            return f"its part {name!r} is {how}" if name else f"it is {how}"
        if any(each is module for each in whole.modules()):
            return f"it is a part of a {type(whole).__name__} that is {how}"
    return ""


def _has(module: nn.Module, name: str) -> bool:
    try:
        return hasattr(module, name)
    except Exception:  # a property that raises now
        return True
