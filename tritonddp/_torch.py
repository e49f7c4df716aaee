"""Every private name of torch and Triton that tritonddp uses, each with its reason.

Checked with torch 2.8 to 2.15, and with Triton 3.4 to 3.9. If a name moves, change only this file.
"""

from __future__ import annotations

import functools
import gc
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from operator import attrgetter
from pkgutil import iter_modules
from types import FrameType, FunctionType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import Variable
from torch.distributed.algorithms.join import Join

# Options of a method of ProcessGroup. The options of other methods are public, in dist.
from torch.distributed.distributed_c10d import AllgatherOptions as AllgatherOptions
from torch.distributed.utils import _cast_forward_inputs, _to_kwargs
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel.distributed import (
    DistributedDataParallel,
    _BufferCommHookLocation,
    _MixedPrecision,
)
from torch.utils import _pytree
from torch.utils.data._utils import worker as _loading
from torch.utils.data.dataloader import _BaseDataLoaderIter

# These functions bind the default group at import time. If they are imported after the group was
# created (by torch._dynamo at the latest), they keep the group and its threads alive even after
# destroy_process_group(). A gloo thread that drops a tensor while the interpreter exits then aborts
# the process ("terminate called without an active exception"). None also means that group.
for _function in vars(torch.distributed.nn.functional).values():
    if isinstance(_function, FunctionType):
        _function.__defaults__ = tuple(
            None if each is dist.group.WORLD else each for each in _function.__defaults__ or ()
        )

# Arguments of stock DDP's class and its _register_buffer_comm_hook; users import them from there.
BufferCommHookLocation = _BufferCommHookLocation
MixedPrecision = _MixedPrecision

# A process group's ``alltoall_base`` has another name since torch 2.14.
ALL_TO_ALL_SINGLE = (
    "all_to_all_single" if hasattr(dist.ProcessGroup, "all_to_all_single") else "alltoall_base"
)

# Leaves of nested containers, including those that libraries register with pytree.
tree_leaves, tree_map = _pytree.tree_leaves, _pytree.tree_map
# Contexts without function modes, without dispatch modes, and without transforms of torch.func.
without_function_modes: Any = torch._C.DisableTorchFunction
without_dispatch_modes: Any = torch._C._DisableTorchDispatch
without_transforms = temporarily_clear_interpreter_stack


def in_transform() -> bool:
    """Return True if a transform of ``torch.func`` runs: outer tensors must not be written then."""
    return peek_interpreter_stack() is not None


# torch's own class, even if its public name was replaced. dynamo uses it.
STOCK: Any = DistributedDataParallel


# Private only by name: torch's optimizers use them. One call for a list takes 0.3 us per small CPU
# tensor; a Python loop of ``copy_`` takes 0.7.
foreach_copy_: Any = torch._foreach_copy_
foreach_zero_: Any = torch._foreach_zero_
foreach_mul: Any = torch._foreach_mul
foreach_mul_: Any = torch._foreach_mul_
foreach_norm: Any = torch._foreach_norm

# Whether torch's profiler runs in this process.
is_profiling: Callable[[], bool] = partial(
    attrgetter("_is_profiler_enabled"), torch.autograd.profiler
)


def agree_on_overflow(combine: Callable[[Any, Any, Any], Any]) -> None:
    """Let ``combine`` decide whether GradScaler has found a gradient that is not finite.

    ``combine(optimizer, found, default)`` replaces ``found``: by device, a tensor that is nonzero
    if a gradient is not finite; empty without gradients. ``default`` is zero. Patched only once.
    """
    scaler: Any = torch.amp.GradScaler
    unscale = scaler._unscale_grads_
    if hasattr(unscale, "__wrapped__"):
        return

    @functools.wraps(unscale)
    def agreed(self: Any, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: Any) -> Any:
        found = unscale(self, optimizer, inv_scale, found_inf, allow_fp16)
        return combine(optimizer, found, found_inf)

    scaler._unscale_grads_ = agreed


def combine_total_norms(combine: Callable[[Sequence[Tensor], float, Any], Tensor | None]) -> None:
    """Let ``combine`` compute norms of several gradients for ``torch.nn.utils.clip_grad_norm_``.

    ``combine(gradients, norm_type, parameters)`` gets ``None`` for the parameters if the user
    called ``get_total_norm`` with gradients. If it returns ``None``, torch computes the norm.
    ``clip_grad_norm_`` looks the function up in its module, so this also works if users have
    imported it by name. Patched once per process.
    """
    clip_grad: Any = importlib.import_module("torch.nn.utils.clip_grad")
    compute = clip_grad._get_total_norm
    if hasattr(compute, "combine"):
        compute.combine = combine
        return

    @functools.wraps(compute)
    def total_norm(
        tensors: Any,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        # Which gradients exist depends on the rank; which parameters are clipped does not.
        caller = sys._getframe(1)
        is_clip = caller.f_code.co_name == "clip_grad_norm_" and caller.f_globals is vars(clip_grad)
        params = caller.f_locals.get("parameters") if is_clip else None
        with torch.no_grad():
            combined = total_norm.combine  # type: ignore[attr-defined]
            total = combined(tensors, float(norm_type), params)
        if total is None:
            return compute(tensors, norm_type, error_if_nonfinite, foreach)
        if error_if_nonfinite:
            compute([total], 2.0, True)  # raises
        return total

    group = clip_grad._group_tensors_by_device_and_dtype

    # On a rank without gradients, clip_grad_value_ groups an empty list, which is an error.
    clip_grad._group_tensors_by_device_and_dtype = lambda some: group(some) if some[0] else {}
    total_norm.combine = combine  # type: ignore[attr-defined]
    clip_grad._get_total_norm = torch.nn.utils.get_total_norm = total_norm


# Hooks of an optimizer, by ID. torch runs them in the methods that this package overrides.
state_dict_pre_hooks = attrgetter("_optimizer_state_dict_pre_hooks")
state_dict_post_hooks = attrgetter("_optimizer_state_dict_post_hooks")
load_state_dict_pre_hooks = attrgetter("_optimizer_load_state_dict_pre_hooks")
load_state_dict_post_hooks = attrgetter("_optimizer_load_state_dict_post_hooks")


# Return type of a communication hook: ``Work.get_future()`` returns the C++ class.
FUTURE: type = torch._C.Future


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend of ``group`` for ``device``, for example ``"gloo"``.

    The public ``get_backend`` returns one name even if a group has several backends, and works only
    for registered groups. A group written in Python has no backends, but has a name.
    """
    try:
        return group._get_backend(device).name()
    except RuntimeError:
        return group.name()


def is_checked(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return True if torch compares the calls of all ranks: ``TORCH_DISTRIBUTED_DEBUG=DETAIL``."""
    return type(group._get_backend(device)).__name__ == "_ProcessGroupWrapper"


def registered_pool(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return a ``torch.cuda.MemPool`` that is registered with ``group``, as symmetric windows.

    ``None`` if torch (before 2.9), the backend or the device does not support it.
    """
    try:
        backend: Any = group._get_backend(device)
        if backend.supports_tensor_alloc(device):
            pool = torch.cuda.MemPool(backend.mem_allocator)
            backend.register_mem_pool(pool, symm=True)
            return pool
    except (AttributeError, RuntimeError, TypeError):
        pass
    return None


def like(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Return a C function (a guard of dynamo) that returns True if its arguments match these.

    It compares dtype, device, sizes and strides. Three loops over attributes take 3 times as long.
    """
    guard = torch._C._dynamo.guards.TensorGuards
    nothing: Any = {"dynamic_dims_sizes": None, "dynamic_dims_strides": None}
    return guard(*tensors, **nothing).check


def process_groups() -> list[dist.ProcessGroup]:
    """Return all process groups of this process that torch knows, even without a wrapped module."""
    return list(dist.distributed_c10d._world.pg_map)


def new_group_of_members(ranks: Sequence[int], timeout: timedelta | None, backend: str) -> Any:
    """Return a ``new_group`` of these global ranks; only these ranks call it.

    If the world was given a device (``init_process_group(device_id=...)``), torch creates groups
    with ``ncclCommSplit``, which waits for all ranks of the world. So the device is hidden.
    """
    world: Any = dist.group.WORLD
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        return dist.new_group(ranks, timeout, backend, use_local_synchronization=True)
    finally:
        world.bound_device_id = bound


def serving_device(group: dist.ProcessGroup, candidates: Sequence[torch.device]) -> torch.device:
    """Return the first candidate whose tensors ``group`` can send; else the CPU."""
    for device in candidates:
        try:
            group._get_backend(device)
        except RuntimeError:
            continue
        return device
    return torch.device("cpu")


def _backend_option(name: str, group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the option ``name`` of the group's backend; ``None`` if it has none."""
    try:
        backend: Any = group._get_backend(device)
        return getattr(backend.options, name)
    except (AttributeError, RuntimeError):
        return None


# For a group and a device: the timeout of collectives, and the number of gloo's threads.
timeout_of: Callable[..., timedelta | None] = partial(_backend_option, "_timeout")
gloo_threads: Callable[..., int | None] = partial(_backend_option, "_threads")


# The current Python frame of each thread of the process, by thread identifier.
frames_of_threads: Callable[[], dict[int, FrameType]] = sys._current_frames


def store_of(group: Any) -> Any:
    """Return the store of ``group``; ``None`` if it was written in Python without a store.

    Up to torch 2.8 the group does not expose its store, and torch forgets it with the group.
    """
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    return dist.distributed_c10d._world.pg_map.get(group, (None, None))[1]


def own_connection(group: dist.ProcessGroup) -> Any:
    """Return a store with the keys of the group's store, on a separate connection.

    Raises:
        AttributeError: a group written in Python has no store.
    """
    store = store_of(group)
    return store.clone() if store.has_extended_api() else store  # files: no connection at all


def collectives_issued(group: dist.ProcessGroup) -> int:
    """Return the number of this rank's collectives in ``group``; 0 for groups written in Python."""
    try:
        return group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    except RuntimeError:
        return 0


def hooks_of_one_collective() -> tuple[Callable[..., Any], ...]:
    """Return communication hooks of torch that issue at most one collective per call."""
    from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks

    return (
        default_hooks.allreduce_hook,
        default_hooks.fp16_compress_hook,
        default_hooks.bf16_compress_hook,
        debugging_hooks.noop_hook,
    )


def steps_optimizers(hook: Any) -> bool:
    """Return True if ``hook`` has the name of stock DDP's hook that steps optimizers."""
    return getattr(hook, "__name__", "") == "apply_optim_in_backward_hook"


def overlapped_optimizer(
    optimizer: type, params: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return what ``_register_fused_optim`` registers: torch's functional ``optimizer``."""
    from torch.distributed.algorithms._optimizer_overlap import _as_overlapped_optim

    return _as_overlapped_optim(optimizer, params, *args, **kwargs)


def optimizer_hooks() -> Any:
    """Return the handles of the hooks that step an optimizer in the backward, by parameter.

    Stock DDP removes these hooks too. ``None`` if ``_apply_optimizer_in_backward`` was not called
    in this process.
    """
    module = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
    if module is None or not len(module.param_to_acc_grad_map):
        return None
    return module.param_to_optim_hook_handle_map


def optimizers_in_backward(param: Tensor) -> list[Any]:
    """Return the optimizers that ``_apply_optimizer_in_backward`` has made for ``param``."""
    return getattr(param, "_in_backward_optimizers", [])


# Whether a profiler watches this thread, and a profiler span that is created in C: the public
# record_function costs 5 us even without a profiler. A profiler of all threads shows the span as an
# operator.
is_profiled = torch._C._autograd._profiler_enabled
cheap_record_function = torch._C._profiler._RecordFunctionFast

# For a GPU index: stream ID, device index and device type of its current stream; and the current
# device. torch.cuda adds Python code to both, which took 20 to 30 us per call in a step on an H100.
raw_current_stream: Any = getattr(torch._C, "_cuda_getCurrentStream", None)
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


# Whether the engine will execute an autograd node in the running backward; takes 0.1 to 0.2 us. The
# public ``register_multi_grad_hook`` uses it too.
will_execute = torch._C._will_engine_execute_node


def captures_leaves(error: RuntimeError) -> bool:
    """Return True if :data:`will_execute` raised ``error`` because ``torch.autograd.grad`` runs."""
    return "autograd.grad()" in str(error)


# ID of the running backward on this thread; -1 outside one. A reentrant checkpoint runs an inner
# backward with a different ID.
current_graph_task_id = torch._C._current_graph_task_id

# Whether the running backward on this thread was called with ``retain_graph=True``.
graph_is_retained = torch._C._autograd._get_current_graph_task_keep_graph

# The autograd node that the engine runs on this thread, even while its hooks run.
current_autograd_node = torch._C._current_autograd_node


def python_function(kind: type) -> Any:
    """Return the ``torch.autograd.Function`` of nodes of this type; ``None`` for C++ nodes."""
    return getattr(kind, "_forward_cls", None)


# The dtype that a user has set for ``.grad`` of a leaf. Up to torch 2.9 it is the leaf's dtype.
grad_dtype_of = attrgetter("grad_dtype" if hasattr(Tensor, "grad_dtype") else "dtype")

# The Python hooks of a tensor; ``None`` if it never had any.
backward_hooks_of = attrgetter("_backward_hooks")


def hooks_after_accumulation(param: Tensor) -> list[Any]:
    """Return the users' hooks that run when ``.grad`` of a parameter has been accumulated.

    Hooks of this package, and methods of lists, which its tracker uses, change no gradients.
    """
    return [
        hook
        for hook in (param._post_accumulate_grad_hooks or {}).values()
        if not _is_ours(getattr(hook, "func", hook))
    ]


def _is_ours(function: Any) -> bool:
    package = str(getattr(function, "__module__", "")).partition(".")[0]
    is_of_list = isinstance(getattr(function, "__self__", None), list)
    return is_of_list or package == __name__.partition(".")[0]


# Run a function when the running backward on this thread is over. FSDP2 and stock DDP end their
# backward the same way; torch has no public name for it.
queue_end_of_backward = Variable._execution_engine.queue_callback


# Whether torch moves an autograd node from a stream that is not captured to one that is. Up to 2.12
# it does not. Only the setter is public: torch.autograd.graph.set_override_stale_capture_stream.
moves_nodes_into_captures: Callable[[], bool] = getattr(
    torch._C, "_override_stale_capture_stream", lambda: False
)


# The C++ tensor of a Python object; torch.utils.swap_tensors changes it.
tensor_behind = attrgetter("_cdata")
# Number of such swaps in this process since count_swaps() was called.
swaps = [0]


@functools.cache
def count_swaps() -> None:
    """Count calls of ``torch.utils.swap_tensors``, also by ``module.to()`` and ``load_state_dict``.

    The count replaces a check of each parameter's tensor in each forward, which took 0.3 us. torch
    leaves hooks in C++ with the former tensor. This function makes the hooks of this package follow
    the parameter, so that even a backward that no forward precedes is noticed.
    """
    extension: Any = torch._C
    swap = extension._swap_tensor_impl

    def counted(first: Tensor, second: Tensor) -> None:
        swap(first, second)
        swaps[0] += 1
        with torch._C.DisableTorchFunctionSubclass():
            hooks = [each._post_accumulate_grad_hooks or {} for each in (first, second)]
            if any(_is_ours(getattr(h, "func", h)) for each in hooks for h in each.values()):
                first._post_accumulate_grad_hooks, second._post_accumulate_grad_hooks = hooks

    extension._swap_tensor_impl = counted


# Context in which tensor subclasses count as plain tensors.
without_overrides = torch._C.DisableTorchFunctionSubclass


def register_post_accumulate_grad_hook(tensor: Tensor, hook: Callable[[Tensor], None]) -> Any:
    """Call ``tensor.register_post_accumulate_grad_hook``, bypassing overrides of subclasses.

    Return the dictionary of hooks and the key of this one: torch's handle takes 300 bytes. Works
    also after ``torch.utils.swap_tensors``, which leaves the hooks with the Python object.
    """
    with torch._C.DisableTorchFunctionSubclass():
        handle = tensor.register_post_accumulate_grad_hook(hook)
        tensor._post_accumulate_grad_hooks = hooks = tensor._post_accumulate_grad_hooks
        return hooks, handle.id


def preserve_version_counters(tensors: Sequence[Tensor]) -> Any:
    """Context in which writes to ``tensors`` do not invalidate graphs that have saved them."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))


# Present once torch.distributed.rpc has been imported, which stock DDP does.
_HAS_RPC = hasattr(torch._C, "_distributed_rpc") and hasattr(torch._C, "_distributed_autograd")


@functools.cache
def keep_dynamo_out(traced: str) -> None:
    """Exclude this package from torch.compile, except the file ``traced`` and functions it calls.

    Otherwise a compiled training step would compile the hooks that its backward calls, and compile
    them again whenever an attribute has changed. dynamo excludes torch's own files with the same
    list. The import takes a second, but creating an optimizer, or stock DDP, imports it too.
    """
    # In a separate thread: the import calls torch.fx.wrap, which makes a reference cycle with all
    # frames below it. The frames of the code that wraps a module would keep the wrapper, and with
    # it the process group, alive until the garbage collector runs.
    with ThreadPoolExecutor(1) as thread:
        rules = thread.submit(importlib.import_module, "torch._dynamo.trace_rules").result()
    room = traced.rpartition(".")[0]
    for package in (__name__.rpartition(".")[0], room):
        for each in iter_modules(sys.modules[package].__path__, f"{package}."):
            if each.name not in (room, traced):
                rules.add(each.name)
    # Generated methods of dataclasses and named tuples are in no file that such a rule could name.
    own = f"{__name__.partition('.')[0]}."
    modules = [sys.modules[name] for name in sys.modules if name.startswith(own)]
    held = [each for module in modules for each in vars(module).values()]
    kinds = [each for each in held if isinstance(each, type) and each.__module__.startswith(own)]
    makers = [getattr(kind, name) for kind in kinds for name in ("__init__", "__new__")]
    for code in [getattr(maker, "__code__", None) for maker in makers]:
        if code is not None and code.co_filename.startswith("<"):
            sys.modules["torch._dynamo.eval_frame"].skip_code(code)


def traced_as(traced: Callable[..., Any]) -> Callable[[Any], Any]:
    """Decorator: when compiled code calls the function, dynamo traces ``traced`` instead.

    Python still runs the decorated function, even if dynamo cannot trace all of ``traced``.
    torch.compile marks its results in the same way.
    """

    def mark(function: Any) -> Any:
        function._torchdynamo_inline = traced
        return function

    return mark


def comptime() -> Callable[[Callable[[Any], None]], None]:
    """Return a function that calls its argument while dynamo traces the call.

    The argument gets a context, whose ``graph()`` is the graph traced so far.
    """
    function: Any = importlib.import_module("torch._dynamo.comptime").comptime
    return function


def graph_inputs(context: Any) -> dict[Any, Tensor]:
    """Return the input tensors of the graph of this context, by their nodes.

    An inner graph, for example of a checkpoint, has the fake tensors of the outermost graph.
    """
    output = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output
    outer = [node.meta for node in output.root_tracer.graph.find_nodes(op="placeholder")]
    real = {id(meta["example_value"]): meta["grapharg"].example for meta in outer}
    inner = output.graph.find_nodes(op="placeholder")
    found = {node: real.get(id(node.meta["example_value"])) for node in inner}
    return {node: each for node, each in found.items() if isinstance(each, Tensor)}


def is_traced(tensor: Tensor) -> bool:
    """Return True if ``tensor`` belongs to a graph that is traced together with its backward.

    Then a hook on an input of the graph is traced too, after the complete gradient of the input.
    """
    module = sys.modules.get("torch._subclasses.functional_tensor")
    return module is not None and isinstance(tensor, module.FunctionalTensor)


@functools.cache
def keep_order(operator: Any) -> None:
    """Make inductor keep the order of graphs that contain ``operator``.

    Otherwise it moves operators without a result to the end, to save memory.
    """
    memory: Any = importlib.import_module("torch._inductor.memory")
    reorder = memory.reorder_for_peak_memory

    @functools.wraps(reorder)
    def reorder_others(nodes: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        targets = (getattr(getattr(node, "node", None), "op_overload", None) for node in nodes)
        return nodes if operator in targets else reorder(nodes, *args, **kwargs)

    memory.reorder_for_peak_memory = reorder_others


# Whether RPC was initialized in this process.
rpc_runs: Callable[[], bool] = (
    torch._C._distributed_rpc._is_current_rpc_agent_set if _HAS_RPC else bool
)


def distributed_context() -> int | None:
    """Return the ID of the current ``torch.distributed.autograd.context()`` of this thread, if any.

    torch has no public name for it. Its private function raises outside a context, so check
    :func:`rpc_runs` first: without RPC there are no contexts.
    """
    try:
        return torch._C._distributed_autograd._current_context()._context_id()
    except RuntimeError:
        return None


def put_into_context(context: int, param: Tensor, gradient: Tensor) -> None:
    """Set the gradient of ``param`` in this context of ``torch.distributed.autograd``.

    This runs TorchScript, because Python gets only a copy of the context's dictionary. The script
    is parsed as IR, because ``torch.jit.script`` would warn that it is deprecated.
    """
    _put()(context, param, gradient)


@functools.cache
def _put() -> Any:
    # The result is returned, since unused operators would be removed.
    graph = torch._C.parse_ir(
        """graph(%context : int, %param : Tensor, %gradient : Tensor):
            %gradients : Dict(Tensor, Tensor) = aten::get_gradients(%context)
            aten::_set_item(%gradients, %param, %gradient)
            return (%gradients)"""
    )
    return torch._C._create_function_from_graph("put_into_context", graph)


# A module of torch, and its attribute that is true if the backward is compiled too. Then it has no
# AccumulateGrad nodes, and calls nothing at its end. Each backward reads it, without a call.
COMPILED_AUTOGRAD = "torch._dynamo.compiled_autograd"
IN_COMPILED_AUTOGRAD = "in_compiled_autograd_region"


def move_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, use_side_stream: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Move tensors in any nesting to ``device``, as stock DDP does for ``device_ids``."""
    moved_args, moved_kwargs = _to_kwargs(args, kwargs, device, use_side_stream)
    return moved_args[0], moved_kwargs[0]


# For a joinable: whether ``Join`` raises on all ranks as soon as one rank has no inputs left.
throws_on_early_termination = attrgetter("_join_config.throw_on_early_termination")


class CountingJoin(Join):
    """torch's ``Join``, which runs the count of ranks with inputs in the context :attr:`counting`.

    So an error in that collective names the missing ranks, in addition to the backend's message.
    """

    counting: Callable[[], AbstractContextManager[None]]  # a method of the subclass

    def _get_num_nonjoined_procs(self) -> float:
        with self.counting():
            return super()._get_num_nonjoined_procs()


def leave_join(joinable: Any) -> None:
    """Reset the state that ``Join`` leaves behind: otherwise each forward would still notify it."""
    joinable._join_config = type(joinable._join_config).construct_disabled_join_config()


def patches_of_stock() -> dict[str, Any]:
    """Return attributes that other libraries have set on torch's class, by name.

    torch's own methods are left out, since they need attributes that this package's class lacks.
    """
    patches = {}
    for name, value in vars(STOCK).items():
        function = getattr(value, "fget", None) or getattr(value, "__func__", value)
        is_torchs = getattr(function, "__module__", None) == STOCK.__module__
        is_internal = name.startswith("__") or name in ("_abc_impl", "_active_ddp_module")
        if not is_torchs and not is_internal:
            patches[name] = value
    return patches


# The wrapper whose forward runs, torch's or ours. dynamo reads it from torch's class, and splits
# the graph by its bucket size.
active_wrapper = partial(getattr, STOCK, "_active_ddp_module")
set_active_wrapper = partial(setattr, STOCK, "_active_ddp_module")


def cast_inputs(
    dtype: torch.dtype, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cast floating-point tensors in any nesting, as stock DDP does for ``mixed_precision``."""
    # All inputs in one container, because an argument of the module may be called dtype.
    return _cast_forward_inputs(dtype, args, kwargs)[0]


def is_sliced(mesh: Any) -> bool:
    """Return True if ``mesh`` is one dimension of a larger mesh."""
    if hasattr(mesh, "_get_root_mesh"):
        return bool(mesh._get_root_mesh() != mesh)
    meshes: Any = importlib.import_module("torch.distributed.device_mesh")  # until torch 2.9
    return bool(meshes._mesh_resources.get_root_mesh(mesh) != mesh)


def running_statistics(layer: torch.nn.Module) -> list[str]:
    """Return names of a layer's buffers with batch statistics, as in BatchNorm."""
    if not isinstance(layer, _NormBase):
        return []
    names = ("running_mean", "running_var", "num_batches_tracked")
    return [name for name in names if layer._buffers.get(name) is not None]


def all_gather_single(output: Tensor, tensor: Tensor, group: dist.ProcessGroup) -> Any:
    """Call ``all_gather_into_tensor``, a name that torch 2.13 deprecates; return the work."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, tensor, group=group, async_op=True)


def reduce_scatter_single(output: Tensor, tensor: Tensor, group: dist.ProcessGroup) -> Any:
    """Call ``reduce_scatter_tensor``, a name that torch 2.13 deprecates; return the work."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(output, tensor, group=group, async_op=True)


# Main function of a DataLoader process; it is looked up when the process starts.
loading_loop = partial(getattr, _loading, "_worker_loop")
set_loading_loop = partial(setattr, _loading, "_worker_loop")


def loading_processes() -> list[Any]:
    """Return the processes of all DataLoaders, which only their iterators know."""
    iterators = [each for each in gc.get_objects() if issubclass(type(each), _BaseDataLoaderIter)]
    return [process for each in iterators for process in getattr(each, "_workers", ())]


def triton_compiled(kernel: Any, *arguments: Any, **options: Any) -> Any:
    """Call Triton's ``kernel.warmup``; return ``None`` in interpreters before 3.5 (no warmup)."""
    warmup = getattr(kernel, "warmup", None)
    return warmup and warmup(*arguments, **options)


def triton_launch(compiled: Any, shape: tuple[int, int, int]) -> Callable[..., None]:
    """Return ``compiled[shape]`` of a Triton kernel, which launches it on the current device.

    Triton makes a record and two calls for profiler hooks in each launch, even if there is no hook.
    They take half of the Python time of a launch. This function skips them, like torch's inductor.
    """
    with_hooks = compiled[shape]  # loads the kernel
    try:
        from triton import knobs
        from triton.runtime import driver

        hooks = knobs.runtime
        run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
        stream_of, device = driver.active.get_current_stream, driver.active.get_current_device()
    except (AttributeError, ImportError):
        return with_hooks

    def launch(*arguments: Any) -> None:
        try:
            is_hooked = hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls
        except AttributeError:  # in Triton 3.4, a hook is a function or None
            is_hooked = hooks.launch_enter_hook or hooks.launch_exit_hook
        if is_hooked:
            with_hooks(*arguments)
        else:
            stream = stream_of(device)
            run(*shape, stream, function, packed, None, None, None, *arguments)

    return launch


def sample_times(wrapper: Any, rate: int) -> None:
    """Let a wrapper, torch's or ours, record the times of one of ``rate`` steps."""
    wrapper._set_ddp_runtime_logging_sample_rate(rate)


def logged_times(wrapper: Any) -> dict[str, int] | None:
    """Return the times of the last recorded step of a wrapper, in ns; ``None`` if there is none.

    ``began``, the start time of its backward, identifies the step.
    """
    data = wrapper._get_ddp_logging_data()
    names = {
        "forward": "forward_compute_time",
        "backward": "backward_compute_time",
        "communication": "backward_comm_time",
        "overlap": "backward_compute_comm_overlap_time",
        "began": "backward_compute_time_start",
    }
    if any(name not in data for name in names.values()):
        return None
    return {name: data[field] for name, field in names.items()}


# C++ names of dtypes: in stock DDP's logging data, and in events of a profile.
CPP_NAMES = {
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.float32: "float",
    torch.float64: "double",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}
