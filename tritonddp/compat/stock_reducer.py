"""What ``ddp.reducer`` is: the names of stock's reducer that others read or call.

Lightning calls them before each backward of manual optimisation, Accelerate in
``trigger_sync_in_backward``, torch's communication hooks, and stock's own tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from tritonddp.buckets.bucket import Bucket
from tritonddp.buckets.bucket_set import BucketSet
from tritonddp.comm.grad_bucket import GradBucket, sum_of, zeros_like
from tritonddp.coordination.counters import Counters
from tritonddp.features.unused_params import StrictUnused
from tritonddp.reducer.output_hooks import watch
from tritonddp.reducer.reducer import Reducer


class StockReducer:
    """A facade of :class:`~tritonddp.reducer.reducer.Reducer`, which knows nothing of it."""

    def __init__(self, core: Reducer) -> None:
        self._core = core

    @property
    def counters(self) -> Counters:
        """Exact counts of what was launched and sent so far."""
        return self._core.counters

    @property
    def buckets(self) -> list[Bucket]:
        """In launch order."""
        return self._core.manager.current.buckets

    @property
    def placement(self) -> BucketSet:
        """The buckets, and where in them each parameter is."""
        return self._core.manager.current

    def prepare_for_forward(self) -> None:
        """See :meth:`Reducer.before_forward`."""
        self._core.before_forward()

    def prepare_for_backward(self, outputs: Sequence[Tensor] = ()) -> None:
        """The next backward is reduced, also if its forward ran under ``no_sync``.

        One through the outputs of a forward until now is even if it starts there. (Here no other
        backward has to be prepared.) ``outputs`` are further ones, that no forward has shown.
        """
        watch(self._core, outputs)
        self._core.forwards.prepare()

    def _set_static_graph(self) -> None:
        """Parameters may be unused.

        Raises:
            RuntimeError: a forward has run already.
        """
        if self._core.forwards_begun:
            raise RuntimeError(
                f"{self._core.where()}: set_static_graph() should be called before training loop "
                "starts and after DistributedDataParallel is constructed. Or wrap with "
                "static_graph=True."
            )
        for extension in self._core.events.extensions:
            if isinstance(extension, StrictUnused):
                self._core.events.remove(extension)

    def _ddp_graph_static(self) -> bool:
        """Whether all reduced backwards have reached the same parameters of this rank."""
        return self._core.is_static

    def _get_local_used_map(self) -> Tensor:
        """On how many ranks the last reduced backward used each trainable parameter: int32."""
        counts: dict[Parameter, int] = {}
        alone = self._core.last_alone
        if alone is not None:
            counts = dict(zip(alone.bucket_set.params, map(int, alone.used), strict=True))
        for index, (params, flags) in enumerate(self._core.manager.rank_counts()):
            if index not in self._core.skipped_last and alone is None:
                counts.update(zip(params, flags.tolist(), strict=True))
        params = [param for _, param in self._core.parameters.trainable]
        return torch.tensor(
            [round(counts.get(param, 0)) for param in params],
            dtype=torch.int32,
            device=params[0].device,
        )

    def _check_reducer_finalized(self) -> None:
        """Raise what the next forward would raise, or make up for.

        Raises:
            RuntimeError: the last backward has not come to its end, or has left parameters unused
                in strict mode.
        """
        core = self._core
        if core.run is not None:
            state = "still runs" if core.backward_runs else "broke off"
            raise RuntimeError(
                "Expected to have finished reduction in the prior iteration before starting a new "
                f"one. {core.where()}: a backward {state}. The next forward takes care of what it "
                "has left."
            )
        if core.deferred_error is not None:
            raise RuntimeError(core.deferred_error)

    def _install_post_backward_futures(self, futures: Sequence[torch.futures.Future]) -> None:
        """Wait for these, of hooks for buffers, when the next backward ends or a forward begins."""
        self._core.post_backward.extend(futures)

    def _remove_autograd_hooks(self) -> None:
        """Let go of the parameters for good, without waiting for any other rank."""
        self._core.detach()

    def _do_nothing(self, *_: Any, **__: Any) -> None:
        """What stock's reducer has to be told is seen here in any case."""

    set_logger = _push_all_rebuilt_params = _delay_all_reduce = _set_sparse_metadata = _do_nothing

    def _rebuild_buckets(self) -> bool:
        """Buckets are rebuilt at the end of a backward, never here."""
        return False

    def refuse_to_be_told(self, *_: Any, **__: Any) -> NoReturn:
        """A forward that is not ours tells ranks without inputs, in stock's way, that it begins."""
        raise RuntimeError(
            f"{self._core.where()}: inside join() a forward tells the ranks that have no inputs "
            "left which collectives it will bring, before all of them. A subclass with a forward "
            "of its own must leave that to tritonddp: call self._pre_forward(*inputs, **kwargs) "
            "before the module and self._post_forward(output) after it, not what stock does there"
        )

    _set_forward_pass_work_handle = refuse_to_be_told

    def _run_comm_hook(self, bucket: GradBucket) -> Any:
        """A future of what the hook, or else the sum over all ranks, makes of ``bucket``."""
        if self._core.comm_hook is None:
            return self._run_allreduce_hook(bucket)
        state, hook = self._core.comm_hook
        return hook(state, bucket)

    def _run_allreduce_hook(self, bucket: GradBucket) -> Any:
        """A future of the sum over all ranks. torch's hooks that step optimizers begin with it."""
        return sum_of(bucket, self._core.group.process_group)

    def _get_zeros_like_grad_buckets(self) -> list[GradBucket]:
        """All buckets, with zeros for gradients."""
        return zeros_like(self.buckets)
