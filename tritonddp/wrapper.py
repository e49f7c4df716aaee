"""The public class: the module that wraps a model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.distributed.algorithms.join import Joinable

from tritonddp._arguments import check_flags, plain_names
from tritonddp._torch import (
    STOCK,
    active_wrapper,
    cheap_record_function,
    distributed_context,
    in_transform,
    is_profiled,
    is_sliced,
    move_inputs,
    rpc_runs,
    set_active_wrapper,
    traced_as,
)
from tritonddp.buckets.assignment import MIB
from tritonddp.buckets.formats import Int8
from tritonddp.buckets.ignored import Ignored
from tritonddp.compat.stock_ddp import StockDDPNames, check_hook
from tritonddp.compiled.forward import in_one_graph
from tritonddp.config import process_group_of, suggesting
from tritonddp.coordination.group import Group
from tritonddp.diagnostics.check_sync import check_sync
from tritonddp.diagnostics.scalars import ReducedScalar
from tritonddp.features.mixed_precision import LowPrecision
from tritonddp.features.optimizer_in_backward import OPTIMIZERS_IN_BACKWARD, step_in_backward
from tritonddp.features.sliced import localize
from tritonddp.features.weighted_mean import weight_of
from tritonddp.reducer.checkpoint import comm_state, load_comm_state
from tritonddp.reducer.graph.backward import tensors_in, watch
from tritonddp.state import DDPState


class DistributedDataParallel(StockDDPNames, nn.Module, Joinable):
    """Data parallelism by gradient averaging: a drop-in for torch's class of the same name.

    Wrap the same module on every rank, then train as with one process: during each ``backward()``
    gradients are averaged over the ranks, bucket by bucket, while the rest of the backward runs.
    Parameters that a backward does not reach need no flag. ``torch.distributed`` must be
    initialized first.

    The arguments are those of :class:`torch.nn.parallel.DistributedDataParallel`, in its order;
    those that stock does not have follow, by name only.

    Args:
        module: the module to train, available as ``.module``; at least one parameter requires
            gradients. Parameters are fp32, fp16, bf16, fp64, complex64 or complex128, on the CPU
            or on CUDA devices.
        device_ids: ``None``, or one CUDA device, to which tensors in the inputs are moved.
        output_device: kept for compatibility, as ``dim``: the module decides where outputs lie.
        broadcast_buffers: deprecated by torch 2.13 for ``forward_sync_buffers``; ``False`` also
            leaves buffers out of the initial broadcast.
        init_sync: verify at construction that all ranks hold the same model, and broadcast
            parameters and buffers from rank 0.
        process_group: the ranks to average over; the default group if ``None``.
        bucket_cap_mb: bucket size in MiB of gradients. By default on CUDA devices 25, smaller to
            both ends (``docs/gpus.md``); with ``compression`` 1, 1, 2, 4, 8, 16, and 25 for all
            others. By default on the CPU 25, and 1 for the first bucket; with ``reduce_dtype`` or
            ``compression`` 1, 1, 2, 4, and 8.
        find_unused_parameters: ``None`` or ``True``: unused parameters are found automatically,
            with ``True`` in stock's buckets. ``False``: one is an error at the next forward.
        gradient_as_bucket_view: ``.grad`` are views of the buckets, which saves a copy and memory.
        static_graph: accepted; all that it makes possible in stock DDP works without it here.
        delay_all_reduce_named_params: parameters, with any names, whose gradients are sent after
            all others, in one bucket for each dtype and device.
        param_to_hook_all_reduce: given with it, a parameter for whose gradient nothing waits: each
            bucket is sent when it is full, and those before it are.
        mixed_precision: a ``torch.nn.parallel.distributed._MixedPrecision``. The module runs with
            parameters and inputs in ``param_dtype``, gradients travel in ``reduce_dtype``
            (``param_dtype`` if it is not given), buffers are cast to ``buffer_dtype`` for good.
            Parameters and ``.grad`` stay in full precision.
        device_mesh: a one-dimensional device mesh, instead of ``process_group``. It may be one
            dimension of a larger mesh, with tensor parallelism in the others.
        skip_all_reduce_unused_params: buckets (but the first) that a backward does not reach are
            not sent. They must be the same on all ranks, otherwise every rank gets an error.
        bucket_cap_mb_list: sizes in MiB of the first, second, ... and all further buckets.
        batched_grad_copy: accepted, as ``check_reduction`` is: gradients are copied in buckets.
        forward_sync_buffers: broadcast buffers from rank 0 before each forward that follows a
            synchronized one. On by default.
        lazy_bucket_allocation: (torch 2.15) buckets have memory during backwards only.
        reduce_dtype: the dtype in which gradients travel and are summed: ``torch.bfloat16`` or
            ``torch.float16`` for half the bytes of fp32, ``torch.float32`` for full precision of
            parameters in low precision. They are scaled before the cast, in fp32; ``.grad`` keeps
            its dtype (``grad_dtype``), and is a copy, also with ``gradient_as_bucket_view``. By
            default each gradient travels in its own dtype, as complex and sparse ones always do.
        compression: ``"int8"`` or ``"int4"``: gradients travel in 8 or 4 bits an element, on
            several hosts of several ranks each between hosts alone. :class:`tritonddp.Int8` has the
            details, and its options; ``docs/fewer-bytes.md``, on which lines it pays.
        check_finite: ``"raise"`` or ``"warn"``: gradients that are NaN or infinite on a rank, or
            beyond the dtype in which they travel, are a ``FloatingPointError`` or a
            ``RuntimeWarning`` at the end of the backward, on every rank alike, with the names of
            the parameters and the ranks. ``.grad`` holds the means by then, and training may go on.
            On a GPU the host waits there. Optimizers in the backward have made their steps, and a
            rank that has run out of inputs inside :meth:`join` only warns.
        transport: ``"auto"``: over gloo, ranks of a host exchange gradients through memory that
            they share, where all hosts have as many ranks each. ``"peer_memory"``: where that
            cannot be, as on GPUs, it is an error. ``"process_group"``, or
            ``TRITONDDP_PEER_MEMORY=0`` in the environment of any rank, leaves it off.
            ``"registered_memory"``: buckets lie in memory that NCCL has registered, an error where
            it cannot. See ``docs/options.md``, ``docs/gpus.md``.
        metrics: ranks time the parts of their steps, and tell each other in each tenth step: for
            :meth:`metrics`.
        gradient_divide_factor: gradients are summed, and divided by this number instead of the
            number of ranks, also inside :meth:`join`. ``1`` sums: for losses whose parts add up
            over the ranks (``docs/batches.md``). Gradients that are in ``.grad`` before a backward,
            reduced already, are added as they are.
        scalars: names of numbers to log, such as ``("loss", "tokens")``: for :meth:`add_scalars`.

    Attributes:
        module: the wrapped module.
        require_backward_grad_sync: whether the next backward is reduced, as :meth:`no_sync` sets.
        reducer: ``reducer.counters`` count what was sent; it also has the names of stock's reducer.

    Raises:
        NotImplementedError: a dtype or kind of parameter that is not supported.
        RuntimeError: no parameter requires gradients, parameters are uninitialized, or ranks hold
            different models (raised on every rank, naming what differs).
        TypeError: an argument has a wrong type, or a flag is neither on nor off.
        ValueError: no process group, or arguments that contradict each other or the module.

    Example::

        model = tritonddp.DistributedDataParallel(module)  # on a GPU: device_ids=[local_rank]
        loss_function(model(inputs), targets).backward()  # .grad holds the means over the ranks
        optimizer.step()
    """

    @suggesting
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
        compression: str | Int8 | None = None,
        check_finite: str | None = None,
        transport: str = "auto",
        metrics: bool = False,
        gradient_divide_factor: float | None = None,
        scalars: Sequence[str] = (),
    ) -> None:
        given = SimpleNamespace(**locals())
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
        super().__init__()  # of the next class: a subclass may have other bases
        self._adopt_patches()
        self.process_group = process_group_of(process_group, device_mesh)
        group = Group(self.process_group)
        group.enter()
        group.recover()  # before the first collective
        if device_mesh is not None:
            self.device_mesh = device_mesh
            if is_sliced(device_mesh):
                localize(module)
        names = plain_names(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        ignored = Ignored(module, names)
        params = ignored.parameters(module)
        state = DDPState.of(given, module, params, group, ignored)
        self._ddp_state, self.parameters_to_ignore = state, names
        Joinable.__init__(self)
        self.module = module
        self._set_arguments(params)
        state.enter_group(self)
        if init_sync:
            state.begin_alike(params)
        if mixed_precision is not None:
            state.low_precision = LowPrecision(module, mixed_precision, ignored)
            state.low_precision.remove_hooks_with(self)
        self._build_reducer()
        state.parameters.register()  # all ranks hold the same module
        DDPState.wrapped += 1

    # One forward

    @traced_as(in_one_graph)
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module, with inputs moved to its device if ``device_ids`` was given.

        Raises:
            NotImplementedError: a parameter was added that cannot be reduced.
            RuntimeError: with ``find_unused_parameters=False``: the last backward left parameters
                unused. Or it waits for :meth:`finalize_backward`; ranks reduced different things,
                or one is gone; an option does not work in ``torch.distributed.autograd.context()``.
        """
        span = record_function if is_profiled() else cheap_record_function
        with span("DistributedDataParallel.forward"):
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            return self._post_forward(self._run_ddp_forward(*inputs, **kwargs))

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module alone. Subclasses may override this to call another method of it."""
        state, outer = self._ddp_state, active_wrapper()  # dynamo splits graphs in here at buckets
        set_active_wrapper(self if max(state.config.caps.limits) >= MIB else None)
        thread = get_ident()
        is_outermost = thread not in state.running
        state.running.add(thread)
        try:
            if state.low_precision is None:
                return (state.call or self.module)(*inputs, **kwargs)
            return state.low_precision.run(self.module, inputs, kwargs)
        finally:
            if is_outermost:
                state.running.discard(thread)
            set_active_wrapper(outer)

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Everything before the module runs; returns the inputs on its device."""
        state = self._ddp_state
        core, sync, sampler = state.core, state.sync, state.logger.sampler
        if sync.enabled and torch.is_grad_enabled():
            sampler.iteration += 1  # here, since a call costs in each step
            if sampler.moments is not None or sampler.iteration >= sampler.next_sample:
                sampler.forward_begins()
        try:
            if OPTIMIZERS_IN_BACKWARD in sys.modules:
                step_in_backward(core)
            core.before_forward()
        except Exception as error:
            state.logger.set_error_and_log(str(error))
            raise
        if sync.join is not None:
            sync.join.announce()
        if state.buffer_sync.for_next_forward:
            state.buffer_sync.write_deferred()
        if (
            self.forward_sync_buffers
            and self.require_forward_param_sync
            and state.parameters.ignored.syncs_buffers
            and self._check_sync_bufs_pre_fwd()
        ):
            self._sync_buffers()
            if state.metrics is not None:
                state.metrics.buffers_synchronized()
        if not state.parameters.is_agreed:
            self._adopt_parameters()
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            aside = self.use_side_stream_for_tensor_copies
            inputs, kwargs = move_inputs(inputs, kwargs, device, aside)
        return inputs, kwargs

    def _adopt_parameters(self) -> None:
        """Parameters have come or gone, and with them buffers perhaps.

        Only now: a rank whose parameters are as before has synchronized its buffers too. In a
        transform of ``torch.func`` the module holds its parameters for this forward only.
        """
        state = self._ddp_state
        if torch.is_grad_enabled() and not in_transform():
            state.core.adopt_parameters()
            if state.parameters.is_agreed and self.will_sync_module_buffers():
                self._sync_buffers()

    def _post_forward(self, output: Any) -> Any:
        """Everything after the module has run; returns its output."""
        state = self._ddp_state
        if state.logger.sampler.moments is not None:
            state.logger.sampler.forward_ended()
        if state.buffer_hook is not None and self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        syncs, has_grad, held = state.sync.enabled, torch.is_grad_enabled(), state.parameters
        if has_grad and (held.trainable or held.have_left()):  # else there is nothing to reduce
            context, core = distributed_context() if rpc_runs() else None, state.core
            if context is None:
                is_one = type(output) is Tensor
                forward = core.forwards.ended(core.counters.reductions, syncs)
                watch(core.reference, forward, (output,) if is_one else tensors_in(output))
            else:
                from tritonddp.features import rpc_contexts  # imports torch.distributed.rpc

                rpc_contexts.watch(core, output, context, syncs)
        # As in stock: the next forward need not synchronize buffers if nothing made ranks differ.
        if self.require_forward_param_sync is not (has_grad and syncs):  # to set it is slow
            self.require_forward_param_sync = has_grad and syncs
        return output

    # Which backwards are reduced, and how much they count

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context: backwards accumulate gradients locally; the first one after it reduces all.

        As in stock, put the forward of each microbatch except the last one inside, alone or with
        its backward: the first backward after a forward outside is reduced, earlier ones are not.
        Unlike in stock, a backward that starts inside is local too, wherever its forward ran. After
        ``reducer.prepare_for_backward([])`` the next backward is reduced in any case.

        Example::

            with model.no_sync():
                for inputs, targets in batches[:-1]:
                    loss_function(model(inputs), targets).backward()
            inputs, targets = batches[-1]
            loss_function(model(inputs), targets).backward()  # reduces what all have accumulated
        """
        sync = self._ddp_state.sync
        before, sync.enabled = sync.enabled, False
        try:
            yield
        finally:
            sync.enabled = before

    @contextmanager
    def weighted(self, n: float | Tensor, reduction: str = "mean") -> Iterator[None]:
        """Context: the gradients of a backward inside have weight ``n`` in the mean over the ranks.

        For batches of different size. The gradients become ``sum_r(n_r g_r) / sum_r(n_r)`` over the
        ranks ``r``. If the loss of each rank is a mean over its own ``n_r`` items (samples,
        tokens), these are the gradients of the mean over the items of all ranks. Without it each
        rank has the same weight, so that an item of a small batch counts more.

        Several backwards may be accumulated under :meth:`no_sync`, each with its own ``n``: the
        sums then run over all backwards of all ranks, whose number may differ. ``backward()`` must
        run inside; the forward need not. Earlier losses without a weight belong to the same mean.

        Every rank must weight the backward that is reduced. If all weights are zero, so are the
        gradients. If ranks accumulate different numbers of backwards, and forwards broadcast
        buffers, run the forwards under :meth:`no_sync` too. In fp16, weights must be within a
        factor of 100 of those of the last reduction, in the first reduction of 16.

        Args:
            n: number of items, zero or more, whole or not; or a tensor of one element, which the
                host reads. With ``n=0`` gradients of a mean are ignored, even if they are NaN.
            reduction: how the loss combines its items. ``"mean"``, or ``"sum"``: then the gradients
                become ``sum_r(g_r) / sum_r(n_r)``, in which those of a rank with ``n=0`` count.

        Raises:
            RuntimeError: in ``backward()``: some ranks have a weight and some have none; weighted
                and other backwards, or those of means and of sums, are accumulated together; or a
                loss that does not depend on the module's outputs is to be accumulated with others.
            TypeError: ``n`` is no number.
            ValueError: ``n`` is negative or not finite, ``reduction`` is unknown, or
                ``gradient_divide_factor`` was given.

        Example::

            n = 8 - 2 * rank  # this rank's samples
            with model.weighted(n):
                loss_function(model(inputs[:n]), targets[:n]).backward()
        """
        weight, sync = weight_of(n, reduction), self._ddp_state.sync
        self._ddp_state.count_weights()
        before, sync.weight = sync.weight, weight
        try:
            yield
        finally:
            sync.weight = before

    def reduce_gradients(
        self,
        gradients: Sequence[Tensor | None] | Mapping[str, Tensor | None] | None = None,
        params: Iterable[Tensor] | None = None,
    ) -> tuple[Tensor | None, ...] | dict[str, Tensor | None] | None:
        """Average gradients over the ranks now, also under :meth:`no_sync`.

        For gradients of ``torch.autograd.grad``, or made by hand. All ranks must call it for the
        same parameters. Inside :meth:`weighted` the mean is weighted. Gradients travel in full
        precision, also with ``compression``.

        Args:
            gradients: ``None`` for ``.grad`` of all parameters that require gradients, which is
                overwritten. Or one, or ``None``, for each of ``params``, as from
                ``torch.autograd.grad``. Or a mapping from names of parameters, as the wrapped
                module has them, to gradients; one that is missing counts as ``None``.
            params: the parameters of the gradients, by default all parameters of the module that
                require gradients, in the order of ``module.parameters()``. One more small
                collective verifies that they are the same on all ranks.

        Returns:
            ``None`` if ``gradients`` is. Otherwise the means, as a tuple or a dictionary: new
            tensors without a graph. ``None`` where no rank had a gradient; if only some ranks had
            one, ``None`` counts as zero.

        Raises:
            RuntimeError: called during a backward or inside :meth:`join`, or the ranks reduce
                different parameters.
            TypeError: a gradient or a parameter is no tensor.
            ValueError: number, name, shape or dtype of gradients and parameters do not match.
            FloatingPointError: with ``check_finite="raise"``, a gradient is not finite on a rank.

        Example::

            loss = loss_function(model(inputs), targets)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            means = model.reduce_gradients(gradients)
        """
        if (join := self._ddp_state.sync.join) is not None:
            join.refuse("reduce_gradients()")
        core = self._ddp_state.core
        if gradients is not None:
            prepare, named = core.prepare_request, self._trainable()
            return core.reducer.reduce_given(gradients, params, named, prepare)
        if params is not None:
            raise ValueError("params without gradients: give the gradients too")
        core.reduce_accumulated()
        return None

    # Stopping together

    def request_stop(self) -> None:
        """Ask all ranks to stop. One is enough, at any time, on any thread, in a signal's handler.

        Example::

            if rank == 0:  # and its clock, a file or the metadata of its host says so
                model.request_stop()
        """
        self._ddp_state.request_stop()

    def should_stop(self) -> bool:
        """Whether a rank has asked: True on all ranks after the same reduction, and from then on.

        It is the first reduction that begins after the request; on a GPU, where the host waits for
        nothing, the one behind that. It costs no collective: see ``docs/stopping.md``. Reductions
        that a failed backward owes the other ranks are made here; raises as :meth:`forward` then.

        Example::

            for inputs, targets in batches:
                loss_function(model(inputs), targets).backward()
                if model.should_stop():
                    break  # all ranks, which can save together now
        """
        return self._ddp_state.should_stop()

    # Reports, and what goes into checkpoints

    def check_sync(self, *, buffers: bool | None = None, gradients: bool | None = None) -> None:
        """Verify that all ranks hold the same parameters, buffers and gradients, bit for bit.

        All ranks must call it. It changes nothing, and training may go on after its error. It makes
        two small collectives, and checksums of 64 bits: a NaN equals the same NaN, 0.0 differs from
        -0.0. Parameters and buffers of ``_ddp_params_and_buffers_to_ignore`` are left out.

        Args:
            buffers: ``None`` for all except those that differ by design: the running statistics of
                BatchNorm and InstanceNorm, which each rank's forwards change by its own batches
                (those of SyncBatchNorm are compared). ``True`` for all, ``False`` for none.
            gradients: ``None`` for all that are equal by design: those written by the last reduced
                backward, of parameters that require gradients. Left out are gradients to which any
                rank has added under :meth:`no_sync` since, or which :meth:`join` has restored.
                ``True`` for all, ``False`` for none. A missing one differs from any other.

        Raises:
            RuntimeError: on every rank, if tensors differ: names the first ones, which ranks have
                which values, and what to do; or if names, shapes or dtypes differ. Also: called
                during a backward or inside :meth:`join`, or a rank does not take part.
            TypeError: an argument is not ``None``, ``True`` or ``False``.

        Example::

            optimizer.step()
            model.check_sync()  # once in some thousand steps
        """
        if (join := self._ddp_state.sync.join) is not None:
            join.refuse("check_sync()")
        state = self._ddp_state
        check_sync(self.module, state.core, state.ignored, buffers, gradients)

    def metrics(self) -> dict[str, float | int | None]:
        """How long steps take. Needs ``metrics=True``. No collective: any rank may call it.

        Returns:
            A dictionary, alike on all ranks between two steps. ``step``: reduced backwards so far.
            ``slowest_rank``: the rank with the longest own time. In milliseconds ``step_ms``, its
            parts ``input_ms``, ``forward_ms``, ``backward_ms`` and ``exposed_ms``, and ``own_ms``,
            all but the last of these: the mean over the ranks, each with ``_min`` and ``_max``
            behind it for the least and the greatest. Each rank sends its mean of ten steps. Values
            that are not known yet, as in the first ten steps, are ``None``.

        Raises:
            RuntimeError: the module was wrapped without ``metrics=True``.

        Example::

            model = tritonddp.DistributedDataParallel(module, metrics=True)
            for inputs, targets in batches:
                loss_function(model(inputs), targets).backward()
            print(model.metrics()["step_ms"], "ms")
        """
        state = self._ddp_state
        if state.metrics is None:
            raise RuntimeError(
                f"rank {state.group.rank}: metrics() needs metrics=True when the module is wrapped"
            )
        return state.metrics.metrics()

    def add_scalars(self, /, **values: float | Tensor) -> None:
        """Add numbers for a log, which the next reduced backward sums over the ranks.

        No collective is added, and the host does not wait for a GPU. Call it before that backward,
        on every rank. Calls add up, as gradients do under :meth:`no_sync`. Inside :meth:`weighted`
        each call has that weight in the mean.

        Args:
            values: for each name of the argument ``scalars`` a real number, or a tensor of one.

        Raises:
            RuntimeError: in ``backward()``, on a GPU in the next one: only some ranks have called.
            TypeError: a value is not a real number.
            ValueError: a name is missing or unknown.

        Example::

            model = tritonddp.DistributedDataParallel(module, scalars=("loss", "tokens"))
            loss = loss_function(model(inputs), targets)
            model.add_scalars(loss=loss, tokens=len(inputs))
            loss.backward()
            scalars = model.reduced_scalars()
            print(scalars["loss"].mean, scalars["tokens"].sum)  # over all ranks
        """
        self._ddp_state.scalars.add(values)

    def reduced_scalars(self) -> dict[str, ReducedScalar]:
        """Return the last sums and means over the ranks of what :meth:`add_scalars` was given.

        Returns:
            By name, ``sum`` and ``mean``: fp64 tensors of shape ``()``, on the device of the module
            and alike on all ranks. The mean is over all calls on all ranks; ranks without inputs
            inside :meth:`join` make none. Without any call the sum is 0, and the mean NaN.
        """
        return self._ddp_state.scalars.reduced()

    def comm_state_dict(self) -> dict[str, Any]:
        """State to save with the module, so that a new wrapper continues with the same bits.

        All ranks call it, between two steps, and each saves its own result.

        Returns:
            ``rank`` and ``world_size`` of this run. Alike on all ranks: ``bucket_order``, names of
            parameters, empty before the first reduced backward; ``keeps_order``, whether they stay
            as registered; ``weight_unit`` of the next weights. Of this rank, with ``compression``:
            ``sent`` and ``reduced``, quantization errors by parameter name, fp32.

        Raises:
            RuntimeError: a backward waits for ``finalize_backward()``.

        Example::

            saved = {"model": module.state_dict(), "comm": model.comm_state_dict()}  # to torch.save
            module.load_state_dict(saved["model"])  # in the next run, on each rank its own
            model.load_comm_state_dict(saved["comm"])
        """
        core = self._ddp_state.core
        core.flush()
        return comm_state(core.reducer)

    def load_comm_state_dict(self, *states: dict[str, Any]) -> None:
        """Continue a saved run: the next step has the same bits as the next step of that run.

        All ranks call it, between two steps, after the module has loaded the parameters of that
        run, frozen ones included. It makes one small all-reduce.

        Args:
            states: what :meth:`comm_state_dict` returned. With the same number of ranks: each
                rank's own state. With fewer or more ranks: the states of all saved ranks ``r`` with
                ``r % world_size`` equal to this rank, which may be none; their quantization errors
                are added up. Parameters that the module does not have are ignored; trainable
                parameters that no state names go last.

        Raises:
            RuntimeError: a backward is under way, or waits for ``finalize_backward()``; or a state
                on another rank is invalid. Then nothing is loaded on any rank.
            TypeError: a state is no dictionary, or an entry has a wrong type.
            ValueError: an entry is missing or out of range; or a parameter had another shape, and
                its gradients have quantization errors.
        """
        core = self._ddp_state.core
        core.flush_outside_backward(
            "load_comm_state_dict() was called while a backward runs: call it between two steps"
        )
        if not core.is_detached:
            load_comm_state(core.reducer, states)

    # Communication hooks

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Let ``hook`` decide how gradients are reduced, bucket by bucket.

        Its result is written to ``.grad``. All hooks of
        ``torch.distributed.algorithms.ddp_comm_hooks`` work. It is called once for each bucket of a
        backward, in the same order on every rank. Register it once, on all ranks between the same
        two steps. :meth:`reduce_gradients` does without it.

        Args:
            state: passed to each call.
            hook: ``hook(state, bucket)``. ``bucket`` has the methods of
                ``torch.distributed.GradBucket`` (see :mod:`tritonddp.comm.grad_bucket`). Its
                gradients are not divided by the number of ranks: that is up to the hook. It returns
                a ``torch.futures.Future`` of one tensor like ``bucket.buffer()``.

        Raises:
            RuntimeError: a hook is registered already, or a backward is under way; and in
                ``backward()``, naming rank, step and bucket, if the hook fails.
            TypeError: ``hook`` is not callable, or is a bfloat16 hook without support in torch.
            ValueError: its annotations have other types, or ``gradient_divide_factor`` was given.

        Example::

            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        """
        self._noting(check_hook, hook)
        self._ddp_state.register_hook(state, hook)
        self._comm_hooks.append((hook, state))

    # When the caller says where a backward ends

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether reduced backwards leave ``.grad`` to :meth:`finalize_backward`. Off by default.

        Other work goes on while gradients travel.

        Raises:
            RuntimeError: when set while a backward waits for its end.
            TypeError: when set to something that is not on or off.

        Example::

            model.require_manual_backward_finalization = True
            assert model.should_finalize_after_backward  # and not in it: it is the first one
            loss_function(model(inputs), targets).backward()  # the all-reduces go on
            model.finalize_backward()  # now .grad holds the means
        """
        return self._ddp_state.finalizes_manually

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        check_flags({"require_manual_backward_finalization": required})
        self._ddp_state.finalize_manually(required)

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether :meth:`finalize_backward` may be called only after the next backward returns.

        True for the first reduced backward, in which the bucket order is not known yet. In later
        ones it may also be called from a hook. Always false if finalization is not manual.
        """
        state = self._ddp_state
        return state.finalizes_manually and state.core.manager.is_provisional

    def finalize_backward(self) -> None:
        """Wait for the reductions of the last backward, and write their results to ``.grad``.

        Call it once for each reduced backward, after it has returned; or from one of its hooks,
        when all buckets have been launched (see :attr:`should_finalize_after_backward`).

        Raises:
            RuntimeError: :attr:`require_manual_backward_finalization` is off, buckets still wait
                for gradients, or no reduction is under way, as under ``no_sync``.
        """
        self._ddp_state.finalize_backward()


# Make isinstance(ddp, torch's class) true, so that checkpointing, Lightning, Accelerate and dynamo
# treat this class like torch's. (The metaclass of torch's class is ABCMeta.)
STOCK.register(DistributedDataParallel)
