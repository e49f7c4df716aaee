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
    """Average gradients over the ranks: a drop-in for torch's class of the same name.

    Wrap the same module on every rank, then train as in a single process. During each
    ``backward()``, gradients are averaged over the ranks, bucket by bucket, while the rest of the
    backward runs. Unused parameters need no flag. Initialize ``torch.distributed`` first.

    The arguments of :class:`torch.nn.parallel.DistributedDataParallel` come first, in the same
    order. The arguments that stock DDP does not have are keyword-only.

    Args:
        module: the module to train, available as ``.module``. At least one parameter must require
            gradients. Parameters may be fp32, fp16, bf16, fp64, complex64 or complex128, on the CPU
            or on CUDA devices.
        device_ids: ``None``, or a list with one CUDA device, to which input tensors are moved.
        output_device: accepted without effect, like ``dim``: the module decides where outputs are.
        broadcast_buffers: deprecated in torch 2.13 in favor of ``forward_sync_buffers``. ``False``
            also excludes buffers from the initial broadcast.
        init_sync: verify at construction that all ranks hold the same model, and broadcast
            parameters and buffers from rank 0.
        process_group: the process group to average over; the default group if ``None``.
        bucket_cap_mb: bucket size in MiB of gradients. The default on CUDA devices is 25, with
            smaller buckets at both ends (``docs/gpus.md``); with ``compression``, it is 4, 8, 16,
            then 25. The default on the CPU is 1 for the first bucket, then 25; with
            ``reduce_dtype`` or ``compression``, it is 1, 1, 2, 4, then 8.
        find_unused_parameters: ``None`` or ``True``: detect unused parameters automatically.
            ``True`` also assigns parameters to buckets as stock DDP does. ``False``: after a
            backward with unused parameters, the next forward raises an error that names them.
        gradient_as_bucket_view: make ``.grad`` views of the buckets, which saves a copy and memory.
        static_graph: accepted. Not needed: everything that it enables in stock DDP always works.
        delay_all_reduce_named_params: pairs of a name (which may be any name) and a parameter.
            Their gradients are sent after all others, in one bucket for each dtype and device.
        param_to_hook_all_reduce: a parameter, required with ``delay_all_reduce_named_params``.
            Unlike in stock DDP, no bucket waits for its gradient: a bucket is sent when it and all
            earlier buckets are full.
        mixed_precision: a ``torch.nn.parallel.distributed._MixedPrecision``. The module runs with
            parameters and inputs in ``param_dtype``, gradients are sent in ``reduce_dtype``
            (default: ``param_dtype``), and buffers are cast to ``buffer_dtype`` permanently.
            Parameters and ``.grad`` stay in full precision.
        device_mesh: a one-dimensional device mesh, instead of ``process_group``. It may be one
            dimension of a larger mesh that uses its other dimensions for tensor parallelism.
        skip_all_reduce_unused_params: do not send buckets (except the first) whose parameters a
            backward does not use. If ranks skip different buckets, every rank raises an error.
        bucket_cap_mb_list: sizes in MiB of the first, second, ... and all further buckets.
        batched_grad_copy: accepted without effect, like ``check_reduction``: gradients are always
            copied bucket by bucket.
        forward_sync_buffers: broadcast buffers from rank 0 before each forward that follows a
            synchronized forward. On by default.
        lazy_bucket_allocation: (torch 2.15) allocate bucket memory during backwards only.
        reduce_dtype: the dtype in which gradients are sent and summed: ``torch.bfloat16`` or
            ``torch.float16`` to send half the bytes of fp32, ``torch.float32`` to sum gradients of
            low-precision parameters in full precision. Gradients are scaled in fp32 before the
            cast. ``.grad`` keeps its dtype (``grad_dtype``) and is a copy, even with
            ``gradient_as_bucket_view``. By default, each gradient is sent in its own dtype, as
            complex and sparse gradients always are.
        compression: ``"int8"`` or ``"int4"``: send gradients with 8 or 4 bits per element. If there
            are several hosts with several ranks each, this applies only between hosts. See
            :class:`tritonddp.Int8` for details and options, and ``docs/fewer-bytes.md`` for the
            networks on which it pays off.
        check_finite: ``"raise"`` or ``"warn"``: if a gradient on any rank is NaN, infinite, or out
            of range of the dtype in which it is sent, raise a ``FloatingPointError`` or issue a
            ``RuntimeWarning`` at the end of the backward. Every rank names the same parameters and
            ranks. ``.grad`` then holds the means, and training may continue. On a GPU, the check
            makes the host wait for the device. Optimizers in the backward have already stepped. A
            rank that has run out of inputs inside :meth:`join` only warns.
        transport: ``"auto"``: over gloo, the ranks of a host exchange gradients through shared
            memory if all hosts have the same number of ranks. ``"peer_memory"``: raise an error
            where that is not possible, for example on GPUs. ``"process_group"``, or
            ``TRITONDDP_PEER_MEMORY=0`` in the environment of any rank: do not use shared memory.
            ``"registered_memory"``: allocate buckets in memory registered with NCCL, or raise an
            error where that is not possible. See ``docs/options.md`` and ``docs/gpus.md``.
        metrics: time the parts of each step, and exchange the times every tenth step; see
            :meth:`metrics`.
        gradient_divide_factor: divide the sum of the gradients by this number instead of the number
            of ranks, also inside :meth:`join`. Use ``1`` if the losses of the ranks add up to the
            total loss (``docs/batches.md``). If ``.grad`` still holds the result of an earlier
            reduction, that result is not reduced again: the new one is added to it.
        scalars: names of the numbers to log with :meth:`add_scalars`, for example
            ``("loss", "tokens")``.

    Attributes:
        module: the wrapped module.
        require_backward_grad_sync: whether the next backward is reduced; set by :meth:`no_sync`.
        reducer: has the interface of stock DDP's reducer, and ``counters`` of launches and bytes.

    Raises:
        NotImplementedError: a dtype or kind of parameter that is not supported.
        RuntimeError: no parameter requires gradients, parameters are uninitialized, or the ranks
            hold different models (raised on every rank, with the names that differ).
        TypeError: an argument has the wrong type, or a flag is neither true nor false.
        ValueError: there is no process group, or arguments contradict each other or the module.

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
        super().__init__()  # next in the MRO: a subclass may have other bases
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
            RuntimeError: with ``find_unused_parameters=False``, the last backward left parameters
                unused. Also if the last backward waits for :meth:`finalize_backward`, if the ranks
                have diverged or one has exited, or if an option does not work in
                ``torch.distributed.autograd.context()``.
        """
        span = record_function if is_profiled() else cheap_record_function
        with span("DistributedDataParallel.forward"):
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            return self._post_forward(self._run_ddp_forward(*inputs, **kwargs))

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run only the module. Subclasses may override this to call another method of it."""
        state, outer = self._ddp_state, active_wrapper()  # tells dynamo to split graphs at buckets
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
        """Do everything that precedes the module's forward. Return the inputs on its device."""
        state = self._ddp_state
        core, sync, sampler = state.core, state.sync, state.logger.sampler
        if sync.enabled and torch.is_grad_enabled():
            sampler.iteration += 1  # inlined: a call would cost time in each step
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
        """Adopt parameters that were added or removed, and synchronize buffers again.

        This follows the usual synchronization of buffers, which ranks with unchanged parameters
        have run too. It is skipped in a transform of ``torch.func``, where the module holds its
        parameters for one forward only.
        """
        state = self._ddp_state
        if torch.is_grad_enabled() and not in_transform():
            state.core.adopt_parameters()
            if state.parameters.is_agreed and self.will_sync_module_buffers():
                self._sync_buffers()

    def _post_forward(self, output: Any) -> Any:
        """Do everything that follows the module's forward. Return its output."""
        state = self._ddp_state
        if state.logger.sampler.moments is not None:
            state.logger.sampler.forward_ended()
        if state.buffer_hook is not None and self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        syncs, has_grad, held = state.sync.enabled, torch.is_grad_enabled(), state.parameters
        if has_grad and (held.trainable or held.have_left()):  # otherwise nothing to reduce
            context, core = distributed_context() if rpc_runs() else None, state.core
            if context is None:
                is_one = type(output) is Tensor
                forward = core.forwards.ended(core.counters.reductions, syncs)
                watch(core.reference, forward, (output,) if is_one else tensors_in(output))
            else:
                from tritonddp.features import rpc_contexts  # imports torch.distributed.rpc

                rpc_contexts.watch(core, output, context, syncs)
        # As in stock DDP: skip the next synchronization of buffers if nothing made ranks differ.
        if self.require_forward_param_sync is not (has_grad and syncs):  # setting it is slow
            self.require_forward_param_sync = has_grad and syncs
        return output

    # Which backwards are reduced, and how much they count

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally in this context; the next backward outside reduces them.

        As in stock DDP, run the forward of every microbatch except the last inside this context,
        with or without its backward. The first backward after a forward outside the context is
        reduced; earlier backwards are not. Unlike in stock DDP, a backward that starts inside the
        context is always local, even if its forward ran outside. After
        ``reducer.prepare_for_backward([])``, the next backward is always reduced.

        Example::

            with model.no_sync():
                for inputs, targets in batches[:-1]:
                    loss_function(model(inputs), targets).backward()
            inputs, targets = batches[-1]
            loss_function(model(inputs), targets).backward()  # reduces all accumulated gradients
        """
        sync = self._ddp_state.sync
        before, sync.enabled = sync.enabled, False
        try:
            yield
        finally:
            sync.enabled = before

    @contextmanager
    def weighted(self, n: float | Tensor, reduction: str = "mean") -> Iterator[None]:
        """Give gradients of backwards in this context the weight ``n`` in the mean over the ranks.

        Use it for batches of different sizes. The gradients become ``sum_r(n_r g_r) / sum_r(n_r)``
        over the ranks ``r``. If the loss of each rank is a mean over its ``n_r`` items (samples,
        tokens), this is the gradient of the mean over the items of all ranks. Without weights, all
        ranks count equally, so an item of a small batch counts more.

        Several backwards may be accumulated under :meth:`no_sync`, each with its own ``n``. The
        sums then run over all backwards of all ranks, and ranks may run different numbers of
        backwards. Call ``backward()`` inside; the forward may run outside. Gradients of unweighted
        backwards accumulated before are part of the same mean.

        Every rank must weight the backward that is reduced. If all weights are zero, the gradients
        are zero. If ranks accumulate different numbers of backwards, and forwards broadcast
        buffers, run the forwards under :meth:`no_sync` too. In fp16, weights must differ from the
        weights of the last reduction (in the first reduction, from 16) by a factor of at most 100.

        Args:
            n: number of items, zero or more, not necessarily an integer; or a tensor with one
                element, which the host reads. With ``n=0``, gradients of a mean are ignored, even
                if they are NaN.
            reduction: how the loss combines its items: ``"mean"`` or ``"sum"``. With ``"sum"``, the
                gradients become ``sum_r(g_r) / sum_r(n_r)``, including those of ranks with ``n=0``.

        Raises:
            RuntimeError: in ``backward()``: only some ranks have a weight; weighted and unweighted
                backwards, or backwards of means and of sums, are accumulated together; or a loss
                that does not depend on the module's outputs would be accumulated with others.
            TypeError: ``n`` is not a number.
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

        Use it for gradients from ``torch.autograd.grad`` or gradients made by hand. All ranks must
        call it for the same parameters. Inside :meth:`weighted`, the mean is weighted. Gradients
        are sent in full precision, even with ``compression``.

        Args:
            gradients: ``None`` to average and overwrite ``.grad`` of all parameters that require
                gradients. Or a gradient or ``None`` for each of ``params``, as returned by
                ``torch.autograd.grad``. Or a mapping from the wrapped module's parameter names to
                gradients; a missing name counts as ``None``.
            params: the parameters of the gradients; by default, all parameters of the module that
                require gradients, in the order of ``module.parameters()``. If given, one more small
                collective verifies that all ranks pass the same parameters.

        Returns:
            ``None`` if ``gradients`` is ``None``. Otherwise the means, as a tuple or a dictionary
            of new tensors without a graph. The mean is ``None`` where no rank had a gradient; if
            only some ranks had one, ``None`` counts as zero.

        Raises:
            RuntimeError: called during a backward or inside :meth:`join`, or the ranks reduce
                different parameters.
            TypeError: a gradient or a parameter is not a tensor.
            ValueError: the number, names, shapes or dtypes of gradients and parameters differ.
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
            raise ValueError("params was given without gradients: pass the gradients too")
        core.reduce_accumulated()
        return None

    # Stopping together

    def request_stop(self) -> None:
        """Ask all ranks to stop. Call it anytime, on any rank or thread, or in a signal handler.

        Example::

            if rank == 0:  # for example, because its time limit is near
                model.request_stop()
        """
        self._ddp_state.request_stop()

    def should_stop(self) -> bool:
        """Return True on all ranks after the same reduction, once any rank has requested a stop.

        The result becomes True after the first reduction that begins after the request. On a GPU,
        it becomes True one reduction later, because the host does not wait for the device. The call
        adds no collective: see ``docs/stopping.md``. If a failed backward owes reductions to the
        other ranks, this call completes them, and may then raise the errors of :meth:`forward`.

        Example::

            for inputs, targets in batches:
                loss_function(model(inputs), targets).backward()
                if model.should_stop():
                    break  # all ranks, which can save together now
        """
        return self._ddp_state.should_stop()

    # Reports and checkpoints

    def check_sync(self, *, buffers: bool | None = None, gradients: bool | None = None) -> None:
        """Verify that all ranks hold the same parameters, buffers and gradients, bit for bit.

        All ranks must call it. It changes nothing, and training may continue after its error. It
        runs two small collectives and compares 64-bit checksums: a NaN equals the same NaN, and 0.0
        differs from -0.0. Tensors in ``_ddp_params_and_buffers_to_ignore`` are excluded.

        Args:
            buffers: ``None`` to check all except those that differ by design: the running
                statistics of BatchNorm and InstanceNorm, which each rank updates with its own
                batches (SyncBatchNorm is checked). ``True`` for all, ``False`` for none.
            gradients: ``None`` to check all that are equal by design: the gradients that the last
                reduced backward wrote, of parameters that require gradients. Excluded are gradients
                to which any rank has since added under :meth:`no_sync`, or which :meth:`join` has
                restored. ``True`` for all, ``False`` for none. A missing gradient differs from any
                other.

        Raises:
            RuntimeError: on every rank, if tensors, names, shapes or dtypes differ. For tensors, it
                names the first ones, the ranks that hold each value, and the remedy. Also if called
                during a backward or inside :meth:`join`, or if a rank does not call it.
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
        """Return step times. Requires ``metrics=True``. Any rank may call it: no collective.

        Returns:
            A dictionary, identical on all ranks between two steps. ``step``: number of reduced
            backwards so far. ``slowest_rank``: the rank with the longest own time. In milliseconds:
            ``step_ms``, its parts ``input_ms``, ``forward_ms``, ``backward_ms`` and ``exposed_ms``,
            and ``own_ms``, the sum of all parts but the last. Each is a mean over the ranks, and
            has a minimum with the suffix ``_min`` and a maximum with ``_max``. Each rank sends its
            mean of ten steps. Values that are not known yet, as in the first ten steps, are
            ``None``.

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
                f"rank {state.group.rank}: metrics() requires metrics=True when wrapping the module"
            )
        return state.metrics.metrics()

    def add_scalars(self, /, **values: float | Tensor) -> None:
        """Add numbers to log, which the next reduced backward sums over the ranks.

        No collective is added, and the host does not wait for a GPU. Call it before that backward,
        on every rank. Calls add up, as gradients do under :meth:`no_sync`. Inside :meth:`weighted`,
        each call has that weight in the mean.

        Args:
            values: for each name in the argument ``scalars``, a real number or one-element tensor.

        Raises:
            RuntimeError: only some ranks called this. Raised in the next ``backward()``; on a GPU,
                in the one after it.
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
        """Return sums and means over the ranks of the last numbers given to :meth:`add_scalars`.

        Returns:
            By name, ``sum`` and ``mean``: fp64 tensors of shape ``()``, on the device of the module
            and identical on all ranks. The mean is over all calls on all ranks; ranks without
            inputs inside :meth:`join` make no calls. Without any call, the sum is 0 and the mean is
            NaN.
        """
        return self._ddp_state.scalars.reduced()

    def comm_state_dict(self) -> dict[str, Any]:
        """Return the state to save with the module, for a new wrapper to continue bit for bit.

        All ranks must call it between two steps, and each rank saves its own result.

        Returns:
            ``rank`` and ``world_size`` of this run. Identical on all ranks: ``bucket_order``, the
            parameter names in bucket order, empty before the first reduced backward;
            ``keeps_order``, whether buckets stay in registration order; ``weight_unit``, by which
            the next weights are divided. Local to this rank, with ``compression``: ``sent`` and
            ``reduced``, the fp32 quantization errors by parameter name.

        Raises:
            RuntimeError: a backward waits for ``finalize_backward()``.

        Example::

            saved = {"model": module.state_dict(), "comm": model.comm_state_dict()}  # to torch.save
            module.load_state_dict(saved["model"])  # in the next run
            model.load_comm_state_dict(saved["comm"])  # on each rank, its own state
        """
        core = self._ddp_state.core
        core.flush()
        return comm_state(core.reducer)

    def load_comm_state_dict(self, *states: dict[str, Any]) -> None:
        """Continue a saved run: the next step is bitwise identical to the next step of that run.

        All ranks must call it between two steps, after the module has loaded the parameters of that
        run, including frozen ones. It runs one small all-reduce.

        Args:
            states: results of :meth:`comm_state_dict`. With the same number of ranks: the state of
                this rank. With fewer or more ranks: the states of all saved ranks ``r`` for which
                ``r % world_size`` is this rank, possibly none; their quantization errors are added
                up. Parameters that the module does not have are ignored. Trainable parameters that
                no state names go last.

        Raises:
            RuntimeError: a backward is running, or waits for ``finalize_backward()``; or a state on
                another rank is invalid. No rank loads anything then.
            TypeError: a state is not a dictionary, or an entry has the wrong type.
            ValueError: an entry is missing or out of range; or a parameter with quantization errors
                in the state has another shape.
        """
        core = self._ddp_state.core
        core.flush_outside_backward(
            "load_comm_state_dict() was called during a backward: call it between two steps"
        )
        if not core.is_detached:
            load_comm_state(core.reducer, states)

    # Communication hooks

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Reduce gradients with ``hook``, bucket by bucket.

        The result of the hook is written to ``.grad``. All hooks of
        ``torch.distributed.algorithms.ddp_comm_hooks`` work. The hook is called once for each
        bucket of a backward, in the same order on every rank. Register it once, on all ranks
        between the same two steps. :meth:`reduce_gradients` does not use it.

        Args:
            state: passed to each call.
            hook: ``hook(state, bucket)``. ``bucket`` has the methods of
                ``torch.distributed.GradBucket`` (see :mod:`tritonddp.comm.grad_bucket`). Its
                gradients are not divided by the number of ranks; the hook decides. The hook returns
                a ``torch.futures.Future`` of one tensor like ``bucket.buffer()``.

        Raises:
            RuntimeError: a hook is already registered, or a backward is running. Also in
                ``backward()``, with rank, step and bucket, if the hook fails.
            TypeError: ``hook`` is not callable, or is a bfloat16 hook that torch does not support.
            ValueError: its annotations are wrong, or ``gradient_divide_factor`` was given.

        Example::

            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        """
        self._noting(check_hook, hook)
        self._ddp_state.register_hook(state, hook)
        self._comm_hooks.append((hook, state))

    # Manual finalization

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether reduced backwards leave ``.grad`` to :meth:`finalize_backward`. Off by default.

        If it is on, other work can run between the backward and the end of its reduction.

        Raises:
            RuntimeError: it is set while a backward waits for finalization.
            TypeError: it is set to a value that is neither true nor false.

        Example::

            model.require_manual_backward_finalization = True
            assert model.should_finalize_after_backward  # true for the first backward
            loss_function(model(inputs), targets).backward()  # does not wait for the all-reduces
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

        True for the first reduced backward, before the bucket order is known. In later backwards,
        a hook may also call it. Always False if finalization is not manual.
        """
        state = self._ddp_state
        return state.finalizes_manually and state.core.manager.is_provisional

    def finalize_backward(self) -> None:
        """Wait for the reductions of the last backward, and write the results to ``.grad``.

        Call it once for each reduced backward: after the backward has returned, or in a hook of the
        backward once all buckets are launched (see :attr:`should_finalize_after_backward`).

        Raises:
            RuntimeError: :attr:`require_manual_backward_finalization` is off, buckets still wait
                for gradients, or no reduction is running, for example under ``no_sync``.
        """
        self._ddp_state.finalize_backward()


# Make isinstance(ddp, torch's class) true, so that checkpointing, Lightning, Accelerate and dynamo
# treat this class like torch's. This works because the metaclass of torch's class is ABCMeta.
STOCK.register(DistributedDataParallel)
