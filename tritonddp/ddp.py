"""What a user holds: the module that wraps a model."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tritonddp._torch import (
    STOCK,
    distributed_context,
    keep_dynamo_out,
    leave_join,
    localize_if_sliced,
    move_inputs,
    serving_device,
)
from tritonddp.beyond_stock import BeyondStock
from tritonddp.buckets.assignment import MIB, BucketCaps
from tritonddp.buckets.exact import Exact
from tritonddp.buckets.formats import AUTO, Wire
from tritonddp.buckets.parameters import Roster
from tritonddp.compat.hook_registration import TakesHooks
from tritonddp.compat.stock_ddp import StockNames, warn_of_static_graph
from tritonddp.config import (
    FLAGS,
    buffer_sync,
    check_flags,
    check_module,
    device_ids_of,
    names_to_ignore,
    process_group_of,
)
from tritonddp.coordination.failures import enter
from tritonddp.coordination.processes import remember_first
from tritonddp.coordination.verify import describe, tell_failure, verify_same
from tritonddp.diagnostics.debug_log import heed_debug_level
from tritonddp.diagnostics.logging_data import Logger
from tritonddp.features.auto_compression.planner import measured
from tritonddp.features.buffer_sync import SyncsBuffers
from tritonddp.features.check_finite import check_mode
from tritonddp.features.delayed_params import Delay
from tritonddp.features.join import Follower, announce_forward, is_joining, reduces_backward
from tritonddp.features.join_protocol import Attendance
from tritonddp.features.mixed_precision import LowPrecision, check_mixed_precision
from tritonddp.features.weighted_mean import Weight
from tritonddp.finalization import Finalizes
from tritonddp.reducer.comm_state import CommState
from tritonddp.reducer.output_hooks import tensors_in
from tritonddp.reducer.reducer import Reducer


class DistributedDataParallel(
    SyncsBuffers, StockNames, BeyondStock, CommState, TakesHooks, Finalizes, Follower
):
    """Data parallelism by gradient averaging: a drop-in for torch's class of the same name.

    Wrap the same module on every rank, then train as with one process: during each ``backward()``
    gradients are averaged over the ranks, bucket by bucket, while the rest of the backward runs.
    Parameters that a backward does not reach need no flag. ``torch.distributed`` must be
    initialised first.

    The arguments are those of :class:`torch.nn.parallel.DistributedDataParallel`, in its order, and
    behind them, by name only, what stock lacks.

    Args:
        module: the module to train, available as ``.module``; at least one parameter requires
            gradients. Parameters are fp32, fp16, bf16, fp64, complex64 or complex128, on the CPU
            or on CUDA devices.
        device_ids: ``None``, or one CUDA device, to which tensors in the inputs are moved.
        output_device: kept for compatibility, as in torch: the module decides where outputs lie.
        dim: kept for compatibility.
        broadcast_buffers: deprecated by torch 2.13 for ``forward_sync_buffers``; ``False`` also
            leaves buffers out of the initial broadcast.
        init_sync: verify at construction that all ranks hold the same model, and broadcast
            parameters and buffers from rank 0.
        process_group: the ranks to average over; the default group if ``None``.
        bucket_cap_mb: bucket size in MiB of gradients. By default 25, and 1 for the first bucket;
            with ``reduce_dtype`` or ``compression`` 1, 1, 2, 4, 8, 16, and 25 for all others, on
            the CPU 8.
        find_unused_parameters: ``None`` or ``True``: unused parameters are found automatically,
            at no cost. ``False``: an unused parameter is an error at the next forward.
        check_reduction: deprecated by torch, without effect.
        gradient_as_bucket_view: ``.grad`` are views of the buckets, which saves one copy of all
            gradients and their memory.
        static_graph: accepted; what it makes possible in stock DDP works here without it.
        delay_all_reduce_named_params: parameters of the module, with any names, whose gradients are
            sent after all others, in one bucket for each dtype and device.
        param_to_hook_all_reduce: and not before this parameter's gradient is there, if a backward
            reaches it. It may be any parameter.
        mixed_precision: a ``torch.nn.parallel.distributed._MixedPrecision``. The module runs with
            parameters and inputs in ``param_dtype``, gradients travel in ``reduce_dtype``
            (``param_dtype`` if it is not given), buffers are cast to ``buffer_dtype`` for good.
            Parameters and ``.grad`` stay in full precision. Gradients that travel in another
            dtype than theirs are copied, also with ``gradient_as_bucket_view``.
        device_mesh: a one-dimensional device mesh, instead of ``process_group``. It may be one
            dimension of a larger mesh, with tensor parallelism in the others.
        skip_all_reduce_unused_params: buckets (but the first) none of whose parameters a backward
            reaches are not sent. They must be the same on all ranks; where they are not, that is
            an error on every rank, after which the process group is of no use.
        bucket_cap_mb_list: sizes in MiB of the first, second, ... bucket; the last one holds for
            all others.
        batched_grad_copy: accepted; gradients are always copied a whole bucket at a time.
        forward_sync_buffers: broadcast buffers from rank 0 before each forward that follows a
            synchronised one. On by default.
        lazy_bucket_allocation: (torch 2.15) buckets get their memory when their first gradients
            are there, and let it go after the backward.
        reduce_dtype: the dtype in which gradients travel and are summed: ``torch.bfloat16`` or
            ``torch.float16`` for half the bytes of fp32, ``torch.float32`` for full precision of
            parameters in low precision. They are scaled before the cast, in fp32; ``.grad`` keeps
            the dtype of its parameter, and is a copy, also with ``gradient_as_bucket_view``. By
            default each gradient travels in its own dtype, as complex and sparse ones always do.
        compression: ``"int8"`` or ``"fp8"`` (e4m3): gradients travel in 8 bits an element and one
            fp32 scale for 256, about a quarter of the bytes of fp32, over gloo or NCCL. All ranks
            end with the same bits. Those of fp64, complex and sparse ones travel as without it. A
            block of 256 elements with a NaN or an infinity is NaN afterwards. Messages take about
            two bytes an element, on the CPU three. ``"auto"``: for each bucket what it would take
            without compression, bf16 or ``"int8"``, by what is measured at construction, which
            takes a second or two: see :meth:`wire_report`.
        error_feedback: what quantisation leaves out of a gradient is kept in fp32, and added to the
            next one: ``4 + 4 / world_size`` bytes an element. Without it errors pile up. Belongs
            into checkpoints: see :meth:`comm_state_dict`.
        exact: parameters whose gradients are not quantised: a name, several names, patterns
            (``"head.*"``), or a function of name and parameter. Those of one dimension or of fewer
            than 1,024 elements and the weights of embeddings never are. They travel in fp32 in the
            same messages.
        check_finite: ``"raise"`` or ``"warn"``: gradients that are NaN or infinite on a rank, or
            beyond the dtype in which they travel, are a ``FloatingPointError`` or a
            ``RuntimeWarning`` at the end of the backward, on every rank alike, with the names of
            the parameters and the ranks. ``.grad`` holds the means by then, and training may go on.
            On a GPU the host waits there for the reduction. Optimizers in the backward have made
            their steps, and a rank that has run out of inputs inside :meth:`join` only warns.

    Attributes:
        module: the wrapped module.
        require_backward_grad_sync: whether the next backward is reduced. :meth:`no_sync` sets it;
            it may also be set directly.
        reducer: :class:`tritonddp.reducer.reducer.Reducer`; ``reducer.counters`` tells what was
        sent.

    Raises:
        NotImplementedError: a dtype or kind of parameter that is not supported.
        RuntimeError: no parameter requires gradients, parameters are uninitialised, or ranks hold
            different models (raised on every rank, naming what differs).
        TypeError: ``module`` is no module, a size no number, a flag not on or off, or another
            argument of another type than it says.
        ValueError: no process group, or arguments that contradict each other or the module.

    Example::

        dist.init_process_group("nccl")
        model = tritonddp.DistributedDataParallel(model.cuda(), device_ids=[local_rank])
    """

    _wrapped = 0  # modules, in this process

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool | None = None,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
        *,
        reduce_dtype: torch.dtype | None = None,
        compression: str | None = None,
        error_feedback: bool = True,
        exact: Any = None,
        check_finite: str | None = None,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
        super().__init__()
        Follower.__init__(self)
        self._adopt_patches()
        self.process_group = process_group_of(process_group, device_mesh)
        enter(self.process_group)  # before the first collective
        self._is_sliced = False
        if device_mesh is not None:
            self.device_mesh = device_mesh
            self._is_sliced = localize_if_sliced(module, device_mesh)
        self.parameters_to_ignore = names_to_ignore(module)
        params = [
            (name, param)
            for name, param in module.named_parameters()
            if name not in self.parameters_to_ignore
        ]
        devices = {param.device for _, param in params}
        self.device = params[0][1].device if params else torch.device("cpu")
        self.device_type = self.device.type
        try:
            check_mode(check_finite)
            check_flags({name: value for name, value in locals().items() if name in FLAGS})
            if mixed_precision is not None:
                check_mixed_precision(mixed_precision)
            exact = None if compression is None else Exact(module, exact)
            self._wire = Wire.of(reduce_dtype, mixed_precision, compression, error_feedback, exact)
            self._wire.check(self.process_group, devices)
            wire_options = self._wire.description(params)  # asks functions of the user
            check_module(module, params, gradient_as_bucket_view, _alive)
            self.device_ids, self.output_device = device_ids_of(device_ids, output_device, devices)
            delay = Delay.of(delay_all_reduce_named_params, param_to_hook_all_reduce, params)
            caps = BucketCaps.of(
                bucket_cap_mb,
                bucket_cap_mb_list,
                delay.names if delay else frozenset(),
                few_bytes_on=self.device_type if reduce_dtype or compression else None,
            )
        except Exception as error:
            # The other ranks must not wait for this one.
            if isinstance(init_sync, int) and init_sync:
                tell_failure(error, self.process_group, self._sendable(device_ids))
            raise
        self.is_multi_device_module = len(devices) > 1
        self.dim = dim
        self.module = module
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.batched_grad_copy = batched_grad_copy
        self.lazy_bucket_allocation = lazy_bucket_allocation
        self.check_finite = check_finite
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.forward_sync_buffers, init_sync_buffers = buffer_sync(
            broadcast_buffers, forward_sync_buffers
        )
        if check_reduction:
            warnings.warn(
                "`check_reduction` is deprecated and has no effect", FutureWarning, stacklevel=2
            )
        if static_graph:
            warn_of_static_graph(find_unused_parameters, stacklevel=2)
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.broadcast_bucket_size = 250 * MIB
        self._bucket_config = caps
        self._init_sync = init_sync
        # Read by stock DDP too; the side stream overlaps input copies with compute.
        self.use_side_stream_for_tensor_copies = (
            os.environ.get("PYTORCH_DDP_USE_SIDE_STREAM", "1") == "1"
        )
        self._delay = delay
        self._delay_all_reduce_params = list(delay.params) if delay else []
        self._enter_group()
        if init_sync:
            buffers = self._roster.buffers() if init_sync_buffers else []
            options: dict[str, Any] = {"bucket sizes": caps.limits}
            if sparse := self._roster.names_of_sparse():
                options["sparse gradients"] = sparse
            if delay is not None:
                options["delayed"] = sorted(caps.delayed)
            if mixed_precision is not None:
                options["mixed_precision"] = mixed_precision
            if reduce_dtype is not None:
                options["reduce_dtype"] = reduce_dtype
            if check_finite is not None:
                options["check_finite"] = check_finite
            options |= wire_options
            verify_same(describe(params, buffers, options), self.process_group, self.device)
            remember_first(self.process_group)
            self._broadcast(
                [tensor.detach() for _, tensor in [*params, *buffers]],
                "wrapping",
                "parameters and buffers",
            )
        self.mixed_precision = mixed_precision
        self._low: LowPrecision | None = None
        if mixed_precision is not None:
            self._low = LowPrecision(module, mixed_precision, self.parameters_to_ignore)
            self._low.remove_hooks_with(self)
        if compression == AUTO and self.process_group.size() > 1:
            dtypes = dict.fromkeys(param.dtype for _, param in params)
            self._wire = measured(self._wire, self.process_group, self.device, dtypes)
        self._build_reducer()
        self._roster.enroll()  # all ranks hold the same module
        DistributedDataParallel._wrapped += 1

    def _sendable(self, device_ids: Any) -> torch.device:
        """A device whose tensors can be sent, also where the module is on a wrong one."""
        devices = [torch.device("cpu")]
        if self.device_type == "cuda":
            devices.insert(0, self.device)
        elif torch.cuda.is_available():
            given = device_ids[0] if isinstance(device_ids, list) and device_ids else None
            if not isinstance(given, int) or given < 0:
                given = torch.cuda.current_device()
            devices.append(torch.device("cuda", given))
        return serving_device(self.process_group, devices)

    def _enter_group(self) -> None:
        """Make what this rank knows of its process group, and of the module. No collective."""
        heed_debug_level()
        enter(self.process_group)
        self._weight: Weight | None = None
        self._attendance = Attendance(self.process_group, self.device)
        self._roster = Roster(
            self, self.parameters_to_ignore, self.process_group, is_fixed=self._is_sliced
        )

    def _build_reducer(self) -> None:
        """Make the reducer, from the options. No collective."""
        keep_dynamo_out()
        self.reducer = Reducer(
            self._roster,
            self.process_group,
            self._bucket_config,
            self._attendance,
            should_sync=_asks(self, "_reduces_backward", False),
            weight=_asks(self, "_weight", None),
            broadcast=_asks(self, "_broadcast", None) if self._init_sync else lambda: None,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            # As in stock: a static graph may leave parameters unused.
            strict=self.find_unused_parameters is False and not self.static_graph,
            skip_unused=self.skip_all_reduce_unused_params,
            delay_until=self._delay.until if self._delay else None,
            wire=self._wire,
            lazy_buckets=self.lazy_bucket_allocation,
            check_finite=self.check_finite,
        )
        self.reducer.finalize_on_request(self._require_manual_backward_finalization)
        self.logger = Logger(self)
        self.reducer.set_logger(self.logger)
        self._register_hooks_again()
        _alive.add(self)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module, with inputs moved to its device if ``device_ids`` was given.

        Raises:
            NotImplementedError: a parameter was added that cannot be reduced.
            RuntimeError: in strict mode, with gradients, the last backward left parameters unused,
                or it waits for :meth:`finalize_backward`; the ranks did not reduce the same, or one
                of them is gone; or inside ``torch.distributed.autograd.context()``, what the user
                has asked for cannot be had there.
        """
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            return self._post_forward(self._run_ddp_forward(*inputs, **kwargs))

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module alone. Subclasses call another method of it here."""
        with self._inside_ddp_forward():
            if self._low is None:
                return self.module(*inputs, **kwargs)
            return self._low.run(self.module, inputs, kwargs)

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """All that is done before the module runs; returns the inputs on its device."""
        if self.require_backward_grad_sync and torch.is_grad_enabled():
            self.logger.set_runtime_stats_and_log()
        self.logger.noting(self.reducer.prepare_for_forward)
        if is_joining(self):
            announce_forward(self)
        if self._check_sync_bufs_pre_fwd():
            self._sync_buffers()
        if self.device_ids:
            inputs, kwargs = move_inputs(
                inputs,
                kwargs,
                torch.device(self.device_type, self.device_ids[0]),
                self.use_side_stream_for_tensor_copies,
            )
        return inputs, kwargs

    def _post_forward(self, output: Any) -> Any:
        """All that is done with what the module has returned; returns it."""
        self.logger.sampler.forward_ended()
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        if torch.is_grad_enabled():
            syncs, context = self.require_backward_grad_sync, distributed_context()
            if context is None:
                self.reducer.watch(tensors_in(output), syncs)
            else:
                self.reducer.watch_in_context(output, context, syncs)
        # As in stock: after a forward that will not be synchronised, the next one need not
        # synchronise buffers, because nothing could have made ranks differ in between.
        self.require_forward_param_sync = (
            torch.is_grad_enabled() and self.require_backward_grad_sync
        )
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context: backwards accumulate gradients locally; the first one after it reduces all.

        As in stock, put the forward of each microbatch but the last one inside, alone or with its
        backward: the first backward that follows a forward outside is reduced, and those before it
        are not. Only here a backward that starts inside is local too, wherever its forward ran.
        ``reducer.prepare_for_backward([])`` behind a forward has its next backward reduced in any
        case.

        Example::

            with model.no_sync():
                for batch in microbatches[:-1]:
                    loss(model(batch)).backward()
            loss(model(microbatches[-1])).backward()  # reduces what all have accumulated
            optimizer.step()
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @property
    def _reduces_backward(self) -> bool:
        """Whether a backward that begins now is reduced."""
        if is_joining(self):
            return reduces_backward(self)
        return self.require_backward_grad_sync

    def __getstate__(self) -> dict[str, Any]:
        """Everything but what belongs to the process group.

        Raises:
            RuntimeError: the process group is not the default one, which alone is there again
                when the state is loaded.
        """
        self._check_default_group()
        attributes = self.__dict__.items()
        return {name: value for name, value in attributes if name not in _OF_THE_GROUP}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        leave_join(self)
        self.process_group = process_group_of(None, None)
        self._enter_group()
        self._build_reducer()
        if self._low is not None:
            self._low.remove_hooks_with(self)

    def _update_process_group(self, new_process_group: Any) -> None:
        """Average over other ranks from now on, for training whose ranks come and go.

        No rank is waited for. What was accumulated under :meth:`no_sync` stays in ``.grad``, and
        the order of gradients is observed anew. What quantisation has left out is dropped. With
        ``compression="auto"`` gradients travel in their own dtypes from then on: nobody has
        measured the new group.

        Args:
            new_process_group: as on all of its ranks. A rank that is not in it gives what
                ``torch.distributed.new_group`` returned there, and begins anew in its old group.
        """
        self.reducer._remove_autograd_hooks()
        if isinstance(new_process_group, dist.ProcessGroup):
            self.process_group = new_process_group
        # A choice by other figures, or by none, would be another one than that of other ranks.
        self._wire = replace(self._wire, figures=None)
        self._enter_group()
        self._build_reducer()


# What is made anew for a process group, and the group itself.
_OF_THE_GROUP = frozenset(
    {"process_group", "reducer", "logger", "_attendance", "_roster", "_weight"}
)

_alive: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()

# torch's own class answers isinstance for this one, so that checkpointing, Lightning, Accelerate
# and dynamo treat it as what it replaces. Its metaclass is ABCMeta.
STOCK.register(DistributedDataParallel)


def _asks(ddp: DistributedDataParallel, attribute: str, otherwise: Any) -> Callable[[], Any]:
    """A question that the reducer may keep without keeping ``ddp`` alive."""
    reference = weakref.ref(ddp)

    def ask() -> Any:
        owner = reference()
        return otherwise if owner is None else getattr(owner, attribute)

    return ask
