"""The private state of a wrapper, in its attribute ``_ddp_state``.

The state creates the reducer and the extensions that the options require. Everything is in one
attribute, so that a user may set any other attribute on the wrapper, and a subclass may forward
all other names to the module.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, ClassVar, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tritonddp.buckets.formats import BucketFactory
from tritonddp.buckets.ignored import Ignored
from tritonddp.buckets.manager import BucketManager
from tritonddp.buckets.parameters import ModuleParameters
from tritonddp.comm.broadcast import StateBroadcast
from tritonddp.comm.comm_hook import CommHook, Hook
from tritonddp.comm.weights import Weights
from tritonddp.compiled.operators import Traced
from tritonddp.config import DDPConfig, sendable
from tritonddp.coordination.agreement import SCHEMA, SOURCE, Agreement, Mismatch
from tritonddp.coordination.counters import Counters
from tritonddp.coordination.group import Group
from tritonddp.coordination.verify import (
    describe,
    plain_tensors,
    refuse_read_only,
    tell_failure,
    verify_same,
)
from tritonddp.diagnostics import hang
from tritonddp.diagnostics.hooked_steps import HookedSteps
from tritonddp.diagnostics.logging_data import Logger
from tritonddp.diagnostics.scalars import Scalars
from tritonddp.diagnostics.unreduced import WatchLocalBackwards
from tritonddp.features.buffer_sync import BufferHook, BufferSync
from tritonddp.features.call_sites import CALL_SITE, CallSites
from tritonddp.features.check_finite import FiniteCheck
from tritonddp.features.metrics import Metrics
from tritonddp.features.mixed_precision import LowPrecision
from tritonddp.features.optimizer_in_backward import step_in_backward
from tritonddp.features.stop_request import StopRequest
from tritonddp.features.unused_params import SKIPPED, SkipUnused, StrictUnused
from tritonddp.features.weighted_mean import AccumulationWindow
from tritonddp.reducer.autograd_driver import AutogradDriver
from tritonddp.reducer.earlier_means import EarlierMeans
from tritonddp.reducer.extension import Extension
from tritonddp.reducer.graph.backward import FAILED, SyncState
from tritonddp.reducer.reducer import Reducer

_T = TypeVar("_T")


@dataclass(eq=False)
class DDPState:
    """The objects and options of one wrapper.

    Attributes:
        call: runs a module that is replicated in place. ``None`` if a wrapper calls the module, and
            in a forked process.
        window: the weighted backwards accumulated so far; ``None`` before the first.
    """

    wrapped: ClassVar[int] = 0  # number of modules wrapped in this process
    live: ClassVar[WeakSet[DDPState]] = WeakSet()  # states of all wrappers with a reducer
    stop_requests: ClassVar[set[object]] = set()  # handlers that stop all wrappers

    config: DDPConfig  # the checked arguments
    device: torch.device  # of the first parameter
    group: Group  # the ranks; objects that depend on the group are created later
    sync: SyncState  # what the user requested for the next backward
    ignored: Ignored  # parameters and buffers that are not synchronized
    low_precision: LowPrecision | None = None  # runs the module with mixed_precision
    call: Callable[..., Any] | None = None
    running: set[int] = field(default_factory=set)  # threads that run a forward
    finalizes_manually: bool = False  # see require_manual_backward_finalization
    builtin_hook: dist.BuiltinCommHookType | None = None  # the registered C++ hook of torch
    buffer_hook: BufferHook | None = None  # registered by the user; replaces the broadcast
    state_broadcast: StateBroadcast = field(init=False)  # sends parameters and buffers
    parameters: ModuleParameters = field(init=False)  # parameters and buffers of the module
    counters: Counters = field(init=False)  # count what was sent
    buffer_sync: BufferSync = field(init=False)  # synchronizes the buffers of the module
    core: AutogradDriver = field(init=False)  # reduces gradients
    metrics: Metrics | None = field(init=False)  # times the parts of a step, with metrics=True
    scalars: Scalars = field(init=False)  # summed with the gradients, if the user named any
    traced: Traced = field(init=False)  # forwards that torch.compile has traced into one graph
    logger: Logger = field(init=False)  # configuration and statistics
    stop: StopRequest = field(init=False)  # whether a rank has requested a stop
    window: AccumulationWindow | None = field(init=False, default=None)

    @classmethod
    def all_live(cls) -> list[DDPState]:
        """Return the states in :attr:`live`."""
        return members(cls.live)

    @classmethod
    def of(
        cls,
        given: Any,
        module: nn.Module,
        params: Sequence[tuple[str, Tensor]],
        group: Group,
        ignored: Ignored,
    ) -> DDPState:
        """Check the constructor's arguments. If they are invalid, notify the other ranks.

        See :meth:`DDPConfig.of`. Raise the errors of :class:`tritonddp.DistributedDataParallel`.
        """
        device = params[0][1].device if params else torch.device("cpu")
        try:
            config = DDPConfig.of(given, module, params, group.process_group)
        except Exception as error:
            # The other ranks must not wait for this one.
            if isinstance(given.init_sync, int) and given.init_sync:
                tell_failure(error, group, sendable(group, device, given.device_ids))
            raise
        return cls(config, device, group, SyncState(), ignored)

    def load(self, process_group: dist.ProcessGroup, syncs: bool) -> None:
        """Set the group and ``syncs`` of a wrapper that was copied or loaded."""
        self.sync, self.group = SyncState(), Group(process_group)
        self.sync.enabled = syncs

    def run_in_place(self, wrapper: nn.Module, call: Callable[..., Any]) -> None:
        """Run the replicated module with ``call``, and reduce any backward that reaches it."""
        self.call = call
        self._count_any_call(wrapper)

    def detach(self) -> None:
        """Make a replicated module a plain module in a forked process."""
        self.call = None

    def _count_any_call(self, wrapper: nn.Module) -> None:
        self.group.join_forks(self)
        step_in_backward(self.core)  # here too, since the module may run without its forward
        self.core.events.install(CallSites(self.sync))
        self.core.count_any_call(partial(_buffers_after_backward, weakref.ref(wrapper)))

    def enter_group(self, wrapper: Any) -> None:
        """Create the objects for the process group and the module's parameters. No collective."""
        self.group.enter()
        hang.watch(self)
        self.state_broadcast = StateBroadcast(self.group, self.sync)
        keeps_frozen = wrapper.find_unused_parameters is True
        self.parameters = ModuleParameters(wrapper, self.ignored, self.group, keeps_frozen)

    def begin_alike(self, params: Sequence[tuple[str, Tensor]]) -> None:
        """Verify that all ranks wrap the same module, and broadcast the values of rank 0.

        As in stock DDP, this sends what the module's ``named_parameters()`` yields, even if that
        hides some of ``params``.

        Raises:
            NotImplementedError: a tensor cannot be overwritten. The message names it.
            RuntimeError: the ranks wrap different modules. The message names what differs.
        """
        parameters = self.parameters
        buffers = parameters.buffers() if self.config.syncs_initial_buffers else []
        options = dict(self.config.options)
        if sparse := parameters.names_of_sparse():
            options["sparse gradients"] = sparse
        sent = plain_tensors(parameters.shown())
        try:
            refuse_read_only([*sent, *buffers])
        except NotImplementedError as error:
            tell_failure(error, self.group, self.device)
            raise
        described = describe([*params, *sent], buffers, options)
        verify_same(described, self.group, self.device)
        self.group.remember_processes()
        tensors = [tensor.detach() for _, tensor in [*sent, *buffers]]
        self.state_broadcast.send(tensors, "wrapping", "parameters and buffers")

    def build_reducer(self, wrapper: Any) -> None:
        """Create the reducer of ``wrapper`` and the objects that use it. No collective."""
        config, group, broadcast = self.config, self.group, self.state_broadcast
        former: StopRequest | None = getattr(self, "stop", None)  # for the previous process group
        # As in stock DDP, unused parameters are not an error with static_graph.
        finds_unused = True if wrapper.static_graph else wrapper.find_unused_parameters
        self.sync.finds_unused = finds_unused
        self.counters, self.window, self.metrics = group.new_counters(), None, None
        self.traced = Traced(wrapper, wrapper._pre_forward)
        weights, self.stop = Weights(group.size, config.divide_factor), StopRequest(group)
        skipped = [SKIPPED] if config.given.skip_all_reduce_unused_params else []
        names = config.options.get("scalars", ())
        self.scalars = Scalars(names, group.rank, self.device, self.sync)
        late = [self.scalars.field] if names else []
        fields = [SCHEMA, *skipped, CALL_SITE, SOURCE, weights, self.stop, *late]
        agreement = Agreement(group, fields)
        reducer = Reducer(
            self.parameters,
            group,
            self._bucket_manager(agreement),
            agreement,
            weights,
            self.counters,
            self.sync,
            broadcast=broadcast if config.given.init_sync else None,
        )
        core = self.core = AutogradDriver(reducer)
        if finds_unused is False:
            core.events.install(StrictUnused(self.parameters, group.rank, core.deferred, self.sync))
        for extension in self._extensions(core):
            core.events.install(extension)
        deferred = [] if former is None else self.buffer_sync.for_next_forward
        self.buffer_sync = BufferSync(
            self.parameters, group, self.sync, self.counters, broadcast, config.transport
        )
        self.buffer_sync.for_next_forward = deferred
        if self.buffer_hook is not None:
            self.use_buffer_hook(self.buffer_hook)
        if self.call is not None:
            self._count_any_call(wrapper)
        core.finalize_manually(self.finalizes_manually)
        self.logger = Logger(wrapper)
        core.events.install(self.logger)
        DDPState.live.add(self)
        # Add to `live` first: a signal may arrive between the two lines. A former request is made
        # again, since the ranks of a new group have not agreed on it.
        if DDPState.stop_requests or (former and (former.default or former.is_stopped)):
            self.request_stop()

    def request_stop(self) -> None:
        """See :meth:`DistributedDataParallel.request_stop`."""
        self.stop.request(self.counters.reductions)

    def should_stop(self) -> bool:
        """See :meth:`DistributedDataParallel.should_stop`."""
        # A backward that failed on this rank may have ended on the other ranks, which then stop.
        self.group.recover()
        return self.stop.should_stop(self.counters.reductions)

    def _bucket_manager(self, agreement: Agreement) -> BucketManager:
        config, group, counters = self.config, self.group, self.counters
        given = config.given
        quantizes = config.wire.compression is not None and group.size > 1
        transport, memory = config.transport.of_wrapper(group, counters, self.device, quantizes)
        # With world_size == 1, autograd's gradients stay in place, and buckets need no memory.
        is_alone = group.is_alone and not AutogradDriver.exchanges_alone
        factory = BucketFactory(
            config.wire,
            group,
            agreement,
            counters,
            transport,
            views=bool(given.gradient_as_bucket_view) and not is_alone,
            lazy=bool(given.lazy_bucket_allocation) or is_alone,
            check_finite=given.check_finite is not None,
            is_registered=config.transport.is_registered,
        )
        return BucketManager(self.parameters, group, config.caps, factory, counters, memory)

    def _extensions(self, core: AutogradDriver) -> Iterator[Extension]:
        config, given, parameters = self.config, self.config.given, self.parameters
        if given.metrics:  # first, so that it ends the step before another extension raises
            device = parameters.params[0][1].device
            self.metrics = Metrics(self.group, device, self.counters)
            yield self.metrics
        if self.group.size > 1:
            yield HookedSteps(core.events)
        yield WatchLocalBackwards(core.manager, core.events, self.sync, self.group.size == 1)
        if given.skip_all_reduce_unused_params:
            yield SkipUnused(self.sync)
        if config.divide_factor not in (None, self.group.size):
            yield EarlierMeans(lambda: parameters.params, "gradient_divide_factor")
        if given.check_finite is not None:
            yield FiniteCheck(given.check_finite, self.group)
        if "scalars" in config.options:
            yield self.scalars

    def finalize_manually(self, required: bool) -> None:
        """See :attr:`DistributedDataParallel.require_manual_backward_finalization`."""
        backward = self.core.backward
        if backward is not None and backward.phase is not FAILED:
            raise RuntimeError(
                f"{self.core.where()}: set_manual_finalization_required cannot be called after "
                "forward while a backward pass is expected or in progress. Set "
                "require_manual_backward_finalization before forward or after backward finalization"
            )
        self.core.finalize_manually(required)
        self.finalizes_manually = required

    @torch.no_grad()
    def finalize_backward(self) -> None:
        """See :meth:`DistributedDataParallel.finalize_backward`."""
        driver = self.core
        if not driver.finalizes_manually:
            raise RuntimeError(
                f"{driver.where()}: finalize_backward() called but manual backward finalization is "
                "not required. Set require_manual_backward_finalization to true first."
            )
        backward = driver.backward
        if backward is not None and backward.is_unfinalized:
            backward.waits_for_user(False)
            self.group.outstanding[driver] = None
            driver.finalize_backward()
            return
        reduction = None if backward is None else backward.reduction
        if backward is not None and backward.runs and reduction is not None:
            if len(reduction.works) < len(reduction.buckets):
                raise RuntimeError(
                    f"{driver.where()}: finalize_backward() called before all DDP buckets were "
                    f"ready. next_bucket_={len(reduction.works)}. Call finalize_backward() only "
                    "after all DDP-managed parameters have computed gradients."
                )
            if any(reduction.works):
                try:
                    with self.group.uninterrupted():
                        reduction.finish()  # the end of the backward does the rest
                except Mismatch as error:
                    driver.reducer.raise_mismatch(error, reduction)
                return
        raise RuntimeError(
            f"{driver.where()}: finalize_backward() called but no gradient reduction requires "
            "finalization. This can happen if no_sync() is active or finalize_backward() was "
            "already called for this backward pass."
        )

    def register_hook(self, state: Any, hook: Hook) -> None:
        """Reduce all buckets with ``hook``. Raise the errors of ``register_comm_hook``."""
        if self.config.divide_factor is not None:
            raise ValueError(
                "gradient_divide_factor and a communication hook are mutually exclusive: the hook "
                "decides how to divide. Remove one of them"
            )
        self.core.flush_outside_backward(
            "a communication hook cannot be registered during a backward"
        )
        factory = self.core.manager.factory
        if factory.owners:
            raise RuntimeError(
                "ZeroRedundancyOptimizer reduces gradients to their owners, a communication hook "
                "to all ranks. They are mutually exclusive: remove one of them"
            )
        if factory.wire.compression is not None:
            raise RuntimeError(
                "compression and a communication hook are mutually exclusive: both decide how "
                "gradients are sent. Remove one of them"
            )
        if self.core.comm_hook is not None:
            raise RuntimeError(
                "register_comm_hook or register_builtin_comm_hook can only be called once."
            )
        self.core.reduce_by(CommHook(hook, state, self.group, self.counters))

    def register_builtin_hook(self, kind: dist.BuiltinCommHookType, hook: Hook) -> None:
        """Reduce all buckets with ``hook``, the equivalent of torch's built-in hook ``kind``."""
        self.register_hook(self.group.process_group, hook)
        self.builtin_hook = kind

    def use_buffer_hook(self, hook: BufferHook) -> None:
        """Synchronize buffers with ``hook``."""
        self.buffer_hook = hook
        if hook.is_after:
            self.traced.refuse_buffers_after()

    def count_weights(self) -> None:
        """Start to record the weights of accumulated gradients.

        Raises:
            ValueError: the user gave ``gradient_divide_factor``.
        """
        if (divisor := self.config.divide_factor) is not None:
            raise ValueError(
                f"weighted(n) and gradient_divide_factor={divisor:g} are mutually exclusive: "
                "weighted(n) divides by the items of all ranks. Remove one of them"
            )
        if self.window is None:
            core = self.core
            self.window = AccumulationWindow(self.parameters, self.sync, core.manager)
            core.events.install(self.window)

    def __getstate__(self) -> dict[str, Any]:
        return {name: each for name, each in vars(self).items() if name not in _OF_THE_GROUP}


def members(live: WeakSet[_T]) -> list[_T]:
    """Return the live members. Takes no lock: safe in signal handlers and on any thread."""
    while True:
        try:
            return list(live)
        except RuntimeError:  # another thread added a member
            continue


# Attributes that a new process group recreates, and the group itself.
_OF_THE_GROUP = {each.name for each in fields(DDPState) if not each.init} | {"group", "sync"}


def _buffers_after_backward(reference: weakref.ref[Any]) -> None:
    """Synchronize the buffers of a replicated module after a reduction.

    Inside ``join()``, forwards synchronize them, as in a wrapper, because ranks without inputs
    participate there.
    """
    wrapper = reference()
    if wrapper is not None and wrapper.forward_sync_buffers:
        state: DDPState = wrapper._ddp_state
        if state.sync.join is None:
            futures = state.buffer_sync.after_backward(state.buffer_hook)
            state.core.post_backward.extend(futures)
