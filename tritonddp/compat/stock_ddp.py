"""Names of torch's class, except constructor and forward, that libraries read or call.

Values that follow from the state of the wrapper are properties, so that they are always current.
"""

from __future__ import annotations

import copy
import inspect
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from tritonddp._arguments import check_flags, plain_names, users_level
from tritonddp._torch import (
    BufferCommHookLocation,
    active_wrapper,
    leave_join,
    move_inputs,
    overlapped_optimizer,
    patches_of_stock,
    set_active_wrapper,
)
from tritonddp.buckets.assignment import MIB
from tritonddp.buckets.grad_storage.sparse_rows import sparse_parameters
from tritonddp.comm.broadcast import broadcast_coalesced
from tritonddp.comm.grad_bucket import GradBucket
from tritonddp.compat.stock_reducer import StockReducer
from tritonddp.compiled.forward import inlined
from tritonddp.config import process_group_of, warn_of_deprecated
from tritonddp.coordination.group import Group
from tritonddp.diagnostics.logging_data import Logger
from tritonddp.features.buffer_sync import BufferHook
from tritonddp.features.join import JoinProtocol, ShadowHook, UnevenInputs
from tritonddp.state import DDPState

# Attributes that copies omit: the process group, and what is created from it; see DDPState.
_OF_THE_GROUP = {"process_group", "reducer", "logger", "_compiled_call_impl"}
# Arguments that are attributes as in stock DDP, but are not read from there in this package.
_ONLY_SHOWN = (
    *("gradient_as_bucket_view", "batched_grad_copy", "lazy_bucket_allocation"),
    *("mixed_precision", "skip_all_reduce_unused_params"),
)


class StockDDPNames:
    """A base of :class:`tritonddp.DistributedDataParallel`, which provides the state used here."""

    if TYPE_CHECKING:  # attributes that the derived class or torch's class sets
        module: nn.Module
        process_group: dist.ProcessGroup
        parameters_to_ignore: set[str]
        logger: Logger
        _ddp_state: DDPState
        _call_impl: Callable[..., Any]

        def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any: ...
        def _adopt_parameters(self) -> None: ...

    # Has no effect, because outputs are never cloned: see _set_ddp_sink_clone.
    _ddp_sink_clone = True

    _compiled_call_impl: Callable[..., Any] | None = None  # as in every nn.Module

    # Stock's forward, and forwards of subclasses written like it, branch on these.
    _use_python_reducer = False
    _delay_all_reduce_all_params = False  # delayed gradients are in buckets too

    @classmethod
    def _adopt_patches(cls) -> None:
        """Copy attributes that other libraries have added to torch's class; fastai adds methods.

        ``__getattr__`` would also work, but would prevent dynamo from tracing attribute reads.
        """
        for name, value in patches_of_stock().items():
            if not hasattr(cls, name):
                setattr(StockDDPNames, name, value)

    def _set_arguments(self, params: Sequence[tuple[str, Tensor]]) -> None:
        """Set the attributes of stock's constructor, and warn as it does, about ``params``."""
        config, given = self._ddp_state.config, self._ddp_state.config.given
        self.dim: int = given.dim
        self.find_unused_parameters: bool | None = given.find_unused_parameters
        self.static_graph: bool = given.static_graph
        for name in _ONLY_SHOWN:
            setattr(self, name, getattr(given, name))
        self.device = self._ddp_state.device
        self.device_type = self.device.type
        self.device_ids, self.output_device = config.device_ids, config.output_device
        self.is_multi_device_module = len({param.device for _, param in params}) > 1
        self.forward_sync_buffers = config.syncs_buffers
        self.require_forward_param_sync = True
        # Stock DDP reads it too. The side stream overlaps input copies with compute.
        variable = os.environ.get("PYTORCH_DDP_USE_SIDE_STREAM", "1")
        self.use_side_stream_for_tensor_copies = variable == "1"
        self._comm_hooks: list[tuple[Callable[..., Any], Any]] = []
        self._divide_by_initial_world_size, self._authoritative_rank = True, 0
        warn_of_deprecated(given)
        if self.static_graph:
            warn_of_static_graph(self.find_unused_parameters)

    def _build_reducer(self) -> None:
        """Create the reducer from the options, with all hooks. Runs no collective.

        If the state of a hook holds a process group, it keeps that group, as in stock DDP.
        """
        state = self._ddp_state
        state.build_reducer(self)
        self.reducer, self.logger = StockReducer(state.core), state.logger
        for hook, of_hook in self._comm_hooks:
            state.register_hook(of_hook, hook)
        if (kind := state.builtin_hook) is not None:
            state.register_builtin_hook(kind, _hook_in_python(kind))

    # Which parameters and buffers

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Sequence[str]
    ) -> None:
        """Exclude these parameters and buffers of ``module`` when it is wrapped.

        Raises:
            TypeError: they are not a list of full names, or ``module`` is not a module.
        """
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
        ignored = plain_names(params_and_buffers_to_ignore)
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore  # type: ignore[assignment]
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name in ignored:
                tensor._ddp_ignored = True  # type: ignore[attr-defined]

    @staticmethod
    def _get_data_parallel_params(
        module: nn.Module, named_params: bool = False
    ) -> Iterator[Tensor | tuple[str, Tensor]]:
        """Yield the synchronized parameters of ``module``, optionally with their names."""
        for name, param in module.named_parameters():
            if not hasattr(param, "_ddp_ignored"):
                yield (name, param) if named_params else param

    def _build_params_for_reducer(self) -> tuple[list[Tensor], list[bool]]:
        """Return the parameters that require gradients, and whether each gradient is sparse.

        torch's error messages name parameters by their index in this list.
        """
        sparse = sparse_parameters(self.module.modules())
        params = [param for _, param in self._trainable()]
        return params, [param in sparse for param in params]

    def _trainable(self) -> list[tuple[str, Tensor]]:
        return [
            (name, param)
            for name, param in self._ddp_state.ignored.parameters(self.module)
            if param.requires_grad
        ]

    def _build_debug_param_to_name_mapping(self, parameters: Sequence[Tensor]) -> dict[int, str]:
        """Return names of the parameters from :meth:`_build_params_for_reducer`, by index.

        Raises:
            TypeError: ``parameters`` is not a list.
            ValueError: they are not the parameters that require gradients.
        """
        if not isinstance(parameters, Sequence):
            raise TypeError(f"parameters should be a list of parameters, got {parameters!r}")
        index_of = {param: index for index, param in enumerate(parameters)}
        names = {}
        for name, param in self._trainable():
            if param not in index_of:
                raise ValueError(
                    f"Param with name {name} found in module parameters, but not DDP parameters: "
                    "was it added after the list was created?"
                )
            names[index_of[param]] = name
        if len(names) != len(index_of):
            raise ValueError(
                "Expected param to name mapping to cover all parameters, but got conflicting "
                f"lengths: {len(index_of)} vs {len(names)}"
            )
        return names

    @property
    def modules_buffers(self) -> list[Tensor]:
        return list(self.named_module_buffers.values())

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        return dict(self._ddp_state.parameters.buffers())

    # Buckets

    @property
    def bucket_bytes_cap(self) -> int:
        """Bucket size in bytes at which dynamo splits the graph of a compiled module."""
        return max(self._ddp_state.config.caps.limits)

    @property
    def bucket_bytes_cap_list(self) -> list[int]:
        caps = self._ddp_state.config.caps
        return list(caps.limits) if caps.is_list else []

    @property
    def bucket_bytes_cap_default(self) -> bool:
        """Whether the first bucket is smaller because no size was given."""
        caps = self._ddp_state.config.caps
        return len(caps.limits) > 1 and not caps.is_list

    @property
    def _has_rebuilt_buckets(self) -> bool:
        """Whether buckets follow the order in which gradients became ready.

        torch's ZeRO waits for this: it skips three steps with ``static_graph``, otherwise two.
        """
        core = self._ddp_state.core
        is_early = self.static_graph and core.counters.reductions < 3
        return not (is_early or core.manager.is_provisional)

    @property
    def _static_graph_delay_allreduce_enqueued(self) -> bool:
        """Whether a backward was reduced.

        The cached losses of sentence-transformers reduce the first backward of a static graph, even
        where they would use :meth:`no_sync`.
        """
        return self._ddp_state.core.counters.reductions > 0

    @_static_graph_delay_allreduce_enqueued.setter
    def _static_graph_delay_allreduce_enqueued(self, value: bool) -> None:
        """Has no effect. A forward copied from stock DDP sets it in its first backward."""

    # Forward

    @property
    def broadcast_bucket_size(self) -> int:
        """Maximum number of bytes in a message of parameters or buffers."""
        return self._ddp_state.state_broadcast.max_bytes

    @broadcast_bucket_size.setter
    def broadcast_bucket_size(self, value: int) -> None:
        self._ddp_state.state_broadcast.max_bytes = value

    @property
    def broadcast_buffers(self) -> bool:
        """The former name of ``forward_sync_buffers``."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @contextmanager
    def _inside_ddp_forward(self) -> Iterator[None]:
        """Context in which stock's :meth:`_run_ddp_forward` runs the module."""
        outer = set_active_wrapper(self if self.bucket_bytes_cap >= MIB else None)
        try:
            yield
        finally:
            set_active_wrapper(outer)

    _get_active_ddp_module = staticmethod(active_wrapper)

    @property
    def _lazy_init_ran(self) -> bool:
        """Whether a forward has run. Stock DDP defers some of its setup until then."""
        return self._ddp_state.core.forwards.seq > 0

    def _do_nothing(self, *_: Any, **__: Any) -> None:
        """Do nothing. Stock DDP sets up its reducer with these calls."""

    _lazy_init = _clear_grad_buffer = _do_nothing

    def _check_global_requires_backward_grad_sync(self, is_joined_rank: bool) -> None:
        """Raise. Stock's forward calls this inside ``join()``.

        Raises:
            RuntimeError: always.
        """
        self.reducer.refuse_notification()

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Sequence[Any]) -> Any:
        """Split tensors along ``dim``, one part for each device."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Concatenate the parts of several devices along ``dim``, on one device."""
        return gather(outputs, output_device, dim=self.dim)

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int) -> Any:
        """Move inputs to a device. Each result is a tuple with one element."""
        device = torch.device(self.device_type, device_id)
        moved = move_inputs(inputs, kwargs, device, self.use_side_stream_for_tensor_copies)
        return (moved[0],), (moved[1],)

    # Options that are set after construction

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next backward is reduced; set by :meth:`no_sync`."""
        return self._ddp_state.sync.enabled

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._ddp_state.sync.enabled = value

    # Copies, and changes of the process group

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that do not belong to the process group.

        Raises:
            RuntimeError: the process group is not the default group. Only the default group can be
                found again when the state is loaded.
        """
        if not dist.is_initialized() or self.process_group != dist.group.WORLD:
            self._log_and_throw(
                RuntimeError,
                "DDP Pickling/Unpickling are only supported when using DDP with the default "
                "process group. That is, when you have called init_process_group and have not "
                "passed process_group argument to DDP constructor. Copy or save its .module "
                "instead, and wrap that again.",
            )
        state = {name: each for name, each in self.__dict__.items() if name not in _OF_THE_GROUP}
        state["_ddp_state"] = copy.copy(self._ddp_state)  # for shallow copies
        return state | {"require_backward_grad_sync": self._ddp_state.sync.enabled}

    def __setstate__(self, state: dict[str, Any]) -> None:
        enabled = state.pop("require_backward_grad_sync")
        nn.Module.__setstate__(cast(nn.Module, self), state)
        self.process_group = process_group_of(None, None)
        self._ddp_state.load(self.process_group, enabled)
        leave_join(self)
        self._ddp_state.enter_group(self)
        self._build_reducer()
        if self._ddp_state.low_precision is not None:
            self._ddp_state.low_precision.remove_hooks_with(self)

    def _update_process_group(self, new_process_group: Any) -> None:
        """Average over other ranks from now on, for training in which ranks join and leave.

        Runs no collective. Gradients accumulated under :meth:`no_sync` stay in ``.grad``. Buckets
        are rebuilt after the next reduced backward, and quantization errors are dropped.

        Args:
            new_process_group: the same group on all of its ranks. A rank outside the group passes
                the value that ``torch.distributed.new_group`` returned there, and starts over in
                its old group.
        """
        self._ddp_state.core.detach()
        if isinstance(new_process_group, dist.ProcessGroup):
            self.process_group = new_process_group
        self._ddp_state.group = Group(self.process_group)
        self._ddp_state.enter_group(self)
        self._build_reducer()

    def _set_static_graph(self) -> None:
        """Allow unused parameters, like ``static_graph=True``.

        Raises:
            RuntimeError: a forward has already run.
        """
        if self.static_graph:
            warnings.warn(
                "You've set static_graph to be True, no need to set it again.", stacklevel=2
            )
            return
        self._noting(self.reducer._set_static_graph)
        self.static_graph = True
        warn_of_static_graph(self.find_unused_parameters)

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Has no effect: outputs are never cloned, and may still be changed in place."""
        self._ddp_sink_clone = val

    # Logging data

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return configuration and statistics of this wrapper, in the fields of stock DDP.

        Sizes are in bytes, times in nanoseconds. The first ten steps are timed, then one in a
        hundred: see :meth:`_set_ddp_runtime_logging_sample_rate`. The times of a step are available
        once the next step has begun, on a GPU possibly later. If parameters are on several devices,
        no times are recorded. The order in which gradients became ready is the order of the first
        reduced backward.
        """
        data = self._ddp_state.logger._get_ddp_logging_data()
        return {**data.strs_map, **data.ints_map}

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """After the first ten steps, time one step in ``sample_rate``.

        Raises:
            TypeError: ``sample_rate`` is not an integer.
            ValueError: it is less than one.
        """
        message = "DDP runtime logging sample rate should be"
        if not isinstance(sample_rate, int):
            self._log_and_throw(TypeError, f"{message} an integer, got {sample_rate!r}")
        if sample_rate < 1:
            self._log_and_throw(ValueError, f"{message} equal or greater than 1, got {sample_rate}")
        self._ddp_state.logger.sampler.set_rate(sample_rate)

    def _noting(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function``. If it raises, record the error in the logging data."""
        try:
            return function(*args)
        except Exception as error:
            self._ddp_state.logger.set_error_and_log(str(error))
            raise

    def _log_and_throw(self, err_type: type[Exception], err_msg: str) -> NoReturn:
        self._ddp_state.logger.set_error_and_log(f"{err_type}: {err_msg}")
        raise err_type(err_msg)

    # Communication hooks

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        """Register ``ALLREDUCE`` or ``FP16_COMPRESS``; see :meth:`register_comm_hook`.

        Raises:
            RuntimeError: as :meth:`register_comm_hook`.
            TypeError: ``comm_hook_type`` is neither of the two.
        """
        hook = _hook_in_python(comm_hook_type)
        self._ddp_state.register_builtin_hook(comm_hook_type, hook)

    def _register_fused_optim(
        self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any
    ) -> None:
        """Let an optimizer step for each bucket as soon as the bucket is reduced.

        Args:
            optim: a class of ``torch.optim`` for which torch has a functional version.
            args, kwargs: arguments of its constructor, without the parameters.
            optim_params: the parameters to step; all by default.

        Raises:
            RuntimeError: the functional version cannot step in DDP, or a hook is already
                registered.
            TypeError: ``optim`` is not a class.
            ValueError: torch has no functional version.
        """
        if not isinstance(optim, type):
            raise TypeError(f"optim should be a class of torch.optim, got {optim!r}")
        try:
            optimizer = overlapped_optimizer(optim, optim_params, args, kwargs)
        except ValueError as error:
            raise ValueError(f"{error} Step it after the backward instead.") from error
        try:
            optimizer.register_ddp(self)
        except NotImplementedError as error:
            raise RuntimeError(
                f"{optim} does not support overlapped DDP. Please file an issue to PyTorch or the "
                f"respective owner of {optim}."
            ) from error

    # Module buffers

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward begins with a broadcast of module buffers."""
        state = self._ddp_state
        if state.call is not None and state.sync.join is None:
            return False  # one rank may run it: buffers follow after the backward
        wanted = self.forward_sync_buffers and self.require_forward_param_sync
        return wanted and len(self._ddp_state.parameters.buffers()) > 0

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile like ``nn.Module.compile``. The forward is traced as a whole."""
        self._compiled_call_impl = torch.compile(inlined(self._call_impl), *args, **kwargs)

    def _check_sync_bufs_pre_fwd(self) -> bool:
        """Whether the next forward begins with :meth:`_sync_buffers`."""
        return not self._check_sync_bufs_post_fwd() and self.will_sync_module_buffers()

    def _check_sync_bufs_post_fwd(self) -> bool:
        """Whether the next forward ends with :meth:`_sync_buffers`, for a buffer hook."""
        hook = self._ddp_state.buffer_hook
        return hook is not None and hook.is_after and self.will_sync_module_buffers()

    def _sync_buffers(self) -> None:
        """Synchronize the module buffers over all ranks, if there are any."""
        state = self._ddp_state
        state.core.post_backward.extend(state.buffer_sync.synchronize(state.buffer_hook))

    def _register_buffer_comm_hook(
        self,
        state: Any,
        hook: Callable[[Any, dict[str, Tensor]], Any],
        comm_hook_location: BufferCommHookLocation = BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        """Synchronize module buffers with ``hook`` instead of a broadcast from rank 0.

        The hook runs in the forwards that would broadcast (see ``forward_sync_buffers``). It
        changes the buffers in place, with any collectives. As in stock DDP, a second call replaces
        the hook.

        Args:
            state: passed to the hook.
            hook: ``hook(state, {name: buffer})``, with the names of the wrapped module. It may
                return a list of :class:`torch.futures.Future`, for which the end of the next
                backward waits.
            comm_hook_location: before or after the forward.

        Raises:
            TypeError: ``hook`` is not callable.
        """
        if not callable(hook):
            raise TypeError(f"hook must be callable, got {type(hook).__name__}")
        is_after = comm_hook_location == BufferCommHookLocation.POST_FORWARD
        self._ddp_state.use_buffer_hook(BufferHook(partial(hook, state), is_after))

    def _default_broadcast_coalesced(
        self,
        bufs: Sequence[Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        """Broadcast buffers as if no hook were registered; for hooks that need it.

        Args:
            bufs: the buffers; all buffers of the module by default.
            bucket_size: maximum number of bytes in a message.
            authoritative_rank: the source, as a rank in the process group.

        Raises:
            TypeError: ``bufs`` is not a list of tensors.
        """
        if bufs is None:
            bufs = self.modules_buffers
        if not isinstance(bufs, Sequence) or not all(isinstance(each, Tensor) for each in bufs):
            raise TypeError(f"bufs should be a list of tensors, got {bufs!r}")
        most = bucket_size or self.broadcast_bucket_size
        process_group = self._ddp_state.group.process_group
        broadcast_coalesced(bufs, process_group, authoritative_rank, most)

    # Uneven inputs

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Return a context in which ranks may run out of inputs at different times.

        A rank that leaves the body waits for the other ranks. It runs the collectives of their
        forwards and backwards with zero gradients. When all ranks have left the body, every rank
        receives the parameters and buffers of a rank that left last.

        Inside, as in stock DDP, the *forward* decides what is reduced, because it notifies the
        waiting ranks: exactly one reduced backward must follow each forward that runs with
        gradients outside :meth:`no_sync`. Run all other backwards under :meth:`no_sync`. If no
        backward follows a forward, the next forward or the end of the body reduces zeros in its
        place. All ranks with inputs must run the same forwards of the same wrapped modules, in the
        same order. Gradients that a rank has accumulated when its inputs end are not reduced.

        Args:
            divide_by_initial_world_size: divide the sum of the gradients by the number of ranks; if
                ``False``, by the number of ranks that still have inputs. Weighted means
                (:meth:`weighted`) are always over the ranks with inputs. As in stock DDP,
                communication hooks do the division themselves.
            enable: ``False`` disables this context.
            throw_on_early_termination: raise an error on all ranks when a rank runs out of inputs.

        Raises:
            RuntimeError: on every rank, if one runs out of inputs and
                ``throw_on_early_termination`` is set; in a forward, if ranks do not agree on
                whether its backward is reduced; in a reduced backward that its forward did not
                announce; if the ranks hold different parameters; or inside another ``join()``.
            TypeError: an argument is neither true nor false.

        Example::

            with model.join():
                for inputs, targets in batches[rank:]:  # fewer of them on some ranks
                    loss_function(model(inputs), targets).backward()
                    optimizer.step()

        With other classes that join, such as ``ZeroRedundancyOptimizer``, use torch's
        ``Join([model, optimizer])``, in the order of their calls. End the body with a backward.
        """
        check_flags({"enable": enable, "throw_on_early_termination": throw_on_early_termination})
        sync = self._ddp_state.sync
        # A failed Join of torch leaves the protocol in place, but its hook no longer exists.
        if sync.join is not None and sync.join_hook() is not None:
            raise RuntimeError(
                f"{self._ddp_state.core.where()}: nested join() of the same wrapped module: the "
                "inner context would also end the outer one. Remove the inner context, or enter "
                "it after the outer one"
            )
        options = {"divide_by_initial_world_size": divide_by_initial_world_size}
        return UnevenInputs([cast(Joinable, self)], enable, throw_on_early_termination, **options)

    def join_hook(self, **kwargs: Any) -> ShadowHook:
        """Return the hook for torch's ``Join`` on ranks without inputs. Options: see :meth:`join`.

        Raises:
            TypeError: an option is neither true nor false.
        """
        divides = kwargs.get("divide_by_initial_world_size", True)
        check_flags({"divide_by_initial_world_size": divides})
        self._ddp_state.group.refuse_if_forked()
        self._ddp_state.logger.note_join()
        hook = ShadowHook(self, divides)
        self._ddp_state.sync.join_hook = weakref.ref(hook)
        return hook

    # Attributes that torch's Join reads

    @property
    def join_device(self) -> torch.device:
        """The device on which torch's ``Join`` counts the ranks that have inputs."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The process group in which torch's ``Join`` counts the ranks that have inputs."""
        return self.process_group

    @property
    def _join_config(self) -> Any:
        """The configuration that torch's ``Join`` sets on entry, and reads in each forward."""
        return self.__dict__["_join_config"]

    @_join_config.setter
    def _join_config(self, config: Any) -> None:
        self.__dict__["_join_config"] = config
        state = self._ddp_state
        state.sync.join = JoinProtocol(self, state) if config.enable else None

    # The reducer

    def _check_reducer_finalized(self) -> None:
        """Check that the last backward is finished; see :class:`StockReducer`.

        Raises:
            RuntimeError: the last backward has not ended, or has left parameters unused.
        """
        self._noting(self.reducer._check_reducer_finalized)

    def _remove_autograd_hooks(self) -> None:
        """Remove all hooks from the parameters. This wrapper then no longer reduces gradients."""
        self._ddp_state.core.detach()


def warn_of_static_graph(find_unused_parameters: bool | None) -> None:
    """Warn if ``find_unused_parameters=True`` is given with a static graph."""
    if find_unused_parameters:
        warnings.warn(
            "You passed find_unused_parameters=true to DistributedDataParallel together with a "
            "static graph. Neither is needed, because unused parameters are detected "
            "automatically.",
            stacklevel=users_level(),
        )


def check_hook(hook: Any) -> None:
    """Check a communication hook as stock DDP does. Raise the errors of ``register_comm_hook``."""
    if not callable(hook):
        raise TypeError(f"Communication hook must be callable. Got {hook!r}.")
    signature = inspect.Signature()  # for C functions, which have no signature
    with suppress(ValueError, TypeError):
        signature = inspect.signature(hook)
    with suppress(Exception):  # only type checkers can evaluate some annotations
        signature = inspect.signature(hook, eval_str=True)
    bucket = signature.parameters.get("bucket")
    if bucket is not None and bucket.annotation not in (bucket.empty, dist.GradBucket, GradBucket):
        raise ValueError(
            "Communication hook: bucket annotation should be dist.GradBucket. It is "
            f"{bucket.annotation}."
        )
    returned = signature.return_annotation
    if returned not in (inspect.Signature.empty, torch.futures.Future[torch.Tensor]):
        raise ValueError(
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor]. "
            f"It is {returned}."
        )
    if getattr(hook, "__name__", "") in ("bf16_compress_hook", "bf16_compress_wrapper_hook"):
        nccl = dist.is_nccl_available() and torch.cuda.is_available()
        if not (nccl and torch.cuda.nccl.version() >= (2, 10)):
            raise TypeError(
                "BF16 all reduce communication hook required CUDA 11+ and NCCL 2.10+ or XPU and "
                "XCCL"
            )


def _hook_in_python(comm_hook_type: Any) -> Any:
    """Return the Python version of one of torch's C++ communication hooks."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    if not isinstance(comm_hook_type, dist.BuiltinCommHookType):
        raise TypeError(
            "comm_hook_type should be dist.BuiltinCommHookType.ALLREDUCE or FP16_COMPRESS, got "
            f"{comm_hook_type!r}"
        )
    is_plain = comm_hook_type == dist.BuiltinCommHookType.ALLREDUCE
    return default_hooks.allreduce_hook if is_plain else default_hooks.fp16_compress_hook
