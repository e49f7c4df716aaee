"""``ddp.reducer``: the names of stock DDP's reducer that other code reads or calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from tritonddp.buckets.bucket import Bucket
from tritonddp.comm.grad_bucket import GradBucket, sum_of
from tritonddp.coordination.counters import Counters
from tritonddp.reducer.autograd_driver import AutogradDriver
from tritonddp.reducer.graph.backward import watch


class StockReducer:
    """The interface of stock DDP's reducer for an
    :class:`~tritonddp.reducer.autograd_driver.AutogradDriver`.
    """

    def __init__(self, core: AutogradDriver) -> None:
        self._core = core

    @property
    def counters(self) -> Counters:
        """Exact counts of launches, collectives and bytes so far."""
        return self._core.counters

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets in launch order."""
        return self._core.manager.current.buckets

    def prepare_for_forward(self) -> None:
        """See :meth:`AutogradDriver.before_forward`."""
        self._core.before_forward()

    def prepare_for_backward(self, outputs: Tensor | Sequence[Tensor] = ()) -> None:
        """Reduce the next backward, even if its forward ran under ``no_sync``.

        A backward through the outputs of a finished forward is reduced even if it starts under
        ``no_sync``. Unlike in stock DDP, other backwards do not need this call. ``outputs``, one
        tensor or several, are needed if no forward has returned the tensors at which the backward
        starts.
        """
        core = self._core
        outputs = [outputs] if isinstance(outputs, Tensor) else outputs
        watch(core.reference, core.forwards.ended(core.counters.reductions, True), outputs)
        self._core.forwards.prepare()

    def _set_static_graph(self) -> None:
        """Allow unused parameters, even with ``find_unused_parameters=False``.

        Raises:
            RuntimeError: a forward has already run.
        """
        if self._core.forwards.seq:
            raise RuntimeError(
                f"{self._core.where()}: set_static_graph() should be called before training loop "
                "starts and after DistributedDataParallel is constructed. Or wrap with "
                "static_graph=True."
            )
        self._core.sync.finds_unused = True

    def _ddp_graph_static(self) -> bool:
        """Return whether all reduced backwards on this rank have used the same parameters."""
        return self._core.use.is_static

    def _get_local_used_map(self) -> Tensor:
        """Count (int32) the ranks that used each trainable parameter in the last reduction."""
        counts: dict[Parameter, int] = {}
        last = self._core.last
        if last is not None and last.is_alone:
            counts = dict(
                zip(last.bucket_set.params, map(int, last.bucket_set.use.flags), strict=True)
            )
        elif last is not None:
            for index, (params, flags) in enumerate(self._core.manager.rank_counts()):
                if index not in last.skipped:
                    counts.update(zip(params, flags.tolist(), strict=True))
        params = [param for _, param in self._core.parameters.trainable]
        return torch.tensor(
            [round(counts.get(param, 0)) for param in params],
            dtype=torch.int32,
            device=params[0].device,
        )

    def _check_reducer_finalized(self) -> None:
        """Raise an error if the last backward is not finished. The next forward would recover.

        Raises:
            RuntimeError: the last backward has not ended; or with
                ``find_unused_parameters=False``, it has left parameters unused.
        """
        core = self._core
        if core.backward is not None:
            state = "is still running" if core.backward_runs else "failed"
            raise RuntimeError(
                "Expected to have finished reduction in the prior iteration before starting a new "
                f"one. {core.where()}: a backward {state}. The next forward completes its "
                "reduction."
            )
        for work in core.deferred:  # they stay
            work()

    def _remove_autograd_hooks(self) -> None:
        """Remove all hooks from the parameters, without waiting for other ranks."""
        self._core.detach()

    def _delay_all_reduce(self) -> None:
        """Has no effect. Stock DDP's reducer needs this call."""

    def _rebuild_buckets(self) -> bool:
        """Return False: buckets are rebuilt after a reduced backward, without this call."""
        return False

    def refuse_notification(self, *_: Any, **__: Any) -> NoReturn:
        """Raise a RuntimeError: a subclass's forward notifies other ranks like stock DDP."""
        raise RuntimeError(
            f"{self._core.where()}: inside join(), a forward first tells the ranks without inputs "
            "which collectives it will run. A subclass that overrides forward must leave this to "
            "tritonddp: call self._pre_forward(*inputs, **kwargs) before the module and "
            "self._post_forward(output) after it, in place of stock DDP's calls"
        )

    _set_forward_pass_work_handle = refuse_notification

    def _run_allreduce_hook(self, bucket: GradBucket) -> Any:
        """Return a future of the sum over all ranks. torch's hooks that step optimizers call it."""
        return sum_of(bucket, self._core.group.process_group)
