"""Names of stock's class that others read or call.

Lightning, Accelerate, torch.distributed.pipelining, ZeRO and dynamo do. What follows from the
state of the wrapper is a property here, so that it is always true.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from tritonddp._arguments import plain_names
from tritonddp._torch import active_wrapper, move_inputs, patches_of_stock, set_active_wrapper
from tritonddp.buckets.assignment import MIB, BucketCaps
from tritonddp.buckets.sparse_bucket import sparse_parameters
from tritonddp.comm.broadcast import MESSAGE_BYTES
from tritonddp.compat.stock_reducer import StockReducer
from tritonddp.diagnostics.logging_data import Logger
from tritonddp.reducer.reducer import Reducer


class StockDDPNames:
    """Of :class:`tritonddp.DistributedDataParallel`."""

    if TYPE_CHECKING:
        module: nn.Module
        process_group: dist.ProcessGroup
        core: Reducer
        reducer: StockReducer
        logger: Logger
        device_type: str
        dim: int
        find_unused_parameters: bool | None
        static_graph: bool
        use_side_stream_for_tensor_copies: bool
        parameters_to_ignore: set[str]
        forward_sync_buffers: bool
        caps: BucketCaps

    # No clone is made of outputs, so that there is nothing to choose: see _set_ddp_sink_clone.
    _ddp_sink_clone = True

    broadcast_bucket_size = MESSAGE_BYTES

    # By these stock's forward, or a subclass that has one like it, decides what to leave out.
    _use_python_reducer = False
    _delay_all_reduce_all_params = False  # delayed gradients have buckets too
    _static_graph_delay_allreduce_enqueued = True  # no first backward needs it

    @classmethod
    def _adopt_patches(cls) -> None:
        """What somebody has put on torch's class is found here too: fastai puts methods there.

        (Not by ``__getattr__``, which would keep dynamo from all that looks at an attribute.)
        """
        for name, value in patches_of_stock().items():
            if not hasattr(cls, name):
                setattr(StockDDPNames, name, value)

    # Which parameters and buffers

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Sequence[str]
    ) -> None:
        """Leave these parameters and buffers of ``module`` alone when it is wrapped.

        Args:
            module: not wrapped yet.
            params_and_buffers_to_ignore: their full names.

        Raises:
            TypeError: they are no list of names, or ``module`` is no module.
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
        """The parameters of ``module`` that are synchronised, with their names if wanted."""
        for name, param in module.named_parameters():
            if not hasattr(param, "_ddp_ignored"):
                yield (name, param) if named_params else param

    def _build_params_for_reducer(self) -> tuple[list[Tensor], list[bool]]:
        """The parameters that require gradients, and of each whether its gradient is sparse.

        Their places in the list are the indices in torch's error messages.
        """
        sparse = sparse_parameters(self.module.modules())
        params = [param for _, param in self._trainable()]
        return params, [param in sparse for param in params]

    def _trainable(self) -> list[tuple[str, Tensor]]:
        return [
            (name, param)
            for name, param in self.module.named_parameters()
            if param.requires_grad and name not in self.parameters_to_ignore
        ]

    def _build_debug_param_to_name_mapping(self, parameters: Sequence[Tensor]) -> dict[int, str]:
        """The names of what :meth:`_build_params_for_reducer` returned, by index.

        Raises:
            TypeError: ``parameters`` are none.
            ValueError: they are others.
        """
        if not isinstance(parameters, Sequence):
            raise TypeError(f"parameters should be a list of parameters, got {parameters!r}")
        index_of = {param: index for index, param in enumerate(parameters)}
        names = {}
        for name, param in self._trainable():
            if param not in index_of:
                raise ValueError(
                    f"Param with name {name} found in module parameters, but not DDP parameters: "
                    "has it been added since?"
                )
            names[index_of[param]] = name
        if len(names) != len(index_of):
            raise ValueError(
                "Expected param to name mapping to cover all parameters, but got conflicting "
                f"lengths: {len(index_of)} vs {len(names)}"
            )
        return names

    @property
    def _module_parameters(self) -> list[Tensor]:
        return [
            param
            for name, param in self.module.named_parameters()
            if name not in self.parameters_to_ignore
        ]

    @property
    def modules_buffers(self) -> list[Tensor]:
        return list(self.named_module_buffers.values())

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        return dict(self.core.parameters.buffers())

    def _assign_modules_buffers(self) -> None:
        """Nothing: :attr:`modules_buffers` looks at the module each time."""

    # Buckets

    @property
    def bucket_bytes_cap(self) -> int:
        """dynamo splits the graph of a compiled module by it."""
        return max(self.caps.limits)

    @property
    def bucket_bytes_cap_list(self) -> list[int]:
        return list(self.caps.limits) if self.caps.is_list else []

    @property
    def bucket_bytes_cap_default(self) -> bool:
        """Whether the first bucket is smaller because no size was given."""
        return len(self.caps.limits) > 1 and not self.caps.is_list

    @property
    def _has_rebuilt_buckets(self) -> bool:
        """Whether buckets follow the order of gradients. ZeRO's hooks wait for it."""
        return not self.core.manager.is_provisional

    # Forward

    @property
    def broadcast_buffers(self) -> bool:
        """The former name of ``forward_sync_buffers``."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @contextmanager
    def _inside_ddp_forward(self) -> Iterator[None]:
        """Context: dynamo, which asks torch's class, finds that this wrapper is at work.

        Not with buckets so small that its optimizer of graphs refuses them: it leaves graphs whole
        then.
        """
        outer = set_active_wrapper(self if self.bucket_bytes_cap >= MIB else None)
        try:
            yield
        finally:
            set_active_wrapper(outer)

    @classmethod
    def _get_active_ddp_module(cls) -> Any:
        """The wrapper whose forward runs, torch's or ours."""
        return active_wrapper()

    @property
    def _lazy_init_ran(self) -> bool:
        """What stock puts off until the first forward is done when that has begun."""
        return self.core.forwards_begun > 0

    def _lazy_init(self) -> None:
        """Nothing is put off."""

    def _clear_grad_buffer(self) -> None:
        """Nothing: the gradients that are delayed have buckets like all others."""

    def _check_global_requires_backward_grad_sync(self, is_joined_rank: bool) -> NoReturn:
        """Ranks without inputs are told by :meth:`_pre_forward` what a forward brings.

        Raises:
            RuntimeError: always. Stock's forward calls this inside ``join()``.
        """
        self.reducer.refuse_to_be_told()

    @property
    def _distributed_rank(self) -> int:
        return self.process_group.rank()

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Sequence[Any]) -> Any:
        """Split tensors along ``dim``, one part for each device."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Put parts on several devices together along ``dim``, on one device."""
        return gather(outputs, output_device, dim=self.dim)

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int) -> Any:
        """Inputs on a device, each in a tuple of one."""
        args, kwargs = move_inputs(
            inputs,
            kwargs,
            torch.device(self.device_type, device_id),
            self.use_side_stream_for_tensor_copies,
        )
        return (args,), (kwargs,)

    # Options that are set late

    def _set_static_graph(self) -> None:
        """As ``static_graph=True``: allows parameters that no backward reaches.

        Raises:
            RuntimeError: a forward has run already.
        """
        if self.static_graph:
            warnings.warn(
                "You've set static_graph to be True, no need to set it again.", stacklevel=2
            )
            return
        self._noting(self.reducer._set_static_graph)
        self.static_graph = True
        warn_of_static_graph(self.find_unused_parameters, stacklevel=3)

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Nothing: outputs are never cloned, and may be changed in place all the same."""
        self._ddp_sink_clone = val

    def _set_sparse_metadata(self, global_unique_ids: Any) -> None:
        self.reducer._set_sparse_metadata(global_unique_ids)

    # What is logged

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """How this wrapper was made and how it is doing.

        Stock's fields. Sizes are in bytes and times in nanoseconds; those of steps are taken in the
        first ten, and then in one of a hundred: see :meth:`_set_ddp_runtime_logging_sample_rate`.
        A step is there with its times when the next one has begun, on a GPU perhaps later. Where
        parameters are on several devices no times are taken. The order in which gradients became
        ready is that of the first reduced backward.
        """
        data = self.logger._get_ddp_logging_data()
        return {**data.strs_map, **data.ints_map}

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Take times in one step of so many, after the first ten.

        Raises:
            TypeError: ``sample_rate`` is no integer.
            ValueError: it is less than one.
        """
        if not isinstance(sample_rate, int):
            message = "DDP runtime logging sample rate should be an integer"
            self._log_and_throw(TypeError, f"{message}, got {sample_rate!r}")
        if sample_rate < 1:
            message = "DDP runtime logging sample rate should be equal or greater than 1"
            self._log_and_throw(ValueError, f"{message}, got {sample_rate}")
        self.logger.sampler.rate = sample_rate

    def _noting(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function``, and note with what error it fails."""
        try:
            return function(*args)
        except Exception as error:
            self.logger.set_error_and_log(str(error))
            raise

    def _log_and_throw(self, err_type: type[Exception], err_msg: str) -> NoReturn:
        self.logger.set_error_and_log(f"{err_type}: {err_msg}")
        raise err_type(err_msg)

    # The reducer

    def _check_reducer_finalized(self) -> None:
        """Has the last backward come to its end, and reached what it should?

        Raises:
            RuntimeError: it has not; or parameters are unused, with
                ``find_unused_parameters=False``.
        """
        self._noting(self.reducer._check_reducer_finalized)

    def _remove_autograd_hooks(self) -> None:
        """Take all hooks off the parameters: this wrapper synchronises no gradient any more."""
        self.core.detach()

    def _check_default_group(self) -> None:
        if not dist.is_initialized() or self.process_group != dist.group.WORLD:
            self._log_and_throw(
                RuntimeError,
                "DDP Pickling/Unpickling are only supported when using DDP with the default "
                "process group. That is, when you have called init_process_group and have not "
                "passed process_group argument to DDP constructor. Copy or save its .module "
                "instead, and wrap that again.",
            )


def warn_of_static_graph(find_unused_parameters: bool | None, stacklevel: int) -> None:
    """A static graph allows unused parameters by itself."""
    if find_unused_parameters:
        warnings.warn(
            "You passed find_unused_parameters=true to DistributedDataParallel beside a static "
            "graph: neither is needed here, unused parameters are found by themselves.",
            stacklevel=stacklevel + 1,
        )
