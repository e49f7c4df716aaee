"""Names of stock's reducer that others call.

Lightning before each backward of manual optimisation, Accelerate in ``trigger_sync_in_backward``,
torch's communication hooks, and stock's own tests.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from tritonddp.comm.grad_bucket import GradBucket, sum_of, zeros_like
from tritonddp.diagnostics.logging_data import Logger

if TYPE_CHECKING:
    from tritonddp.buckets.manager import Arrangement
    from tritonddp.buckets.parameters import Roster
    from tritonddp.reducer.output_hooks import Forwards
    from tritonddp.reducer.participation import Constancy


class StockReducerNames:
    """Of :class:`tritonddp.reducer.reducer.Reducer`, what is not its own business."""

    if TYPE_CHECKING:
        arrangement: Arrangement
        _roster: Roster
        _group: dist.ProcessGroup
        forwards: int
        _constancy: Constancy
        _left_out: Collection[int]
        _strict: bool
        _where: Callable[[], str]
        watch: Callable[[Sequence[Tensor]], None]
        _forwards: Forwards
        _run_hook: Callable[[GradBucket], Any] | None

    _logger: Callable[[], Logger | None] = staticmethod(lambda: None)

    def prepare_for_backward(self, outputs: Sequence[Tensor] = ()) -> None:
        """The next backward is reduced, also if its forward ran under ``no_sync``.

        One through the outputs of a forward until now is even if it starts there. (Here no other
        backward has to be prepared.)

        Args:
            outputs: which it goes through, of a forward in which they were not seen.
        """
        self.watch(outputs)
        self._forwards.prepare()

    def _set_static_graph(self) -> None:
        """Parameters may be unused.

        Raises:
            RuntimeError: a forward has run already.
        """
        if self.forwards:
            raise RuntimeError(
                f"{self._where()}: set_static_graph() should be called before training loop starts "
                "and after DistributedDataParallel is constructed. Or wrap with static_graph=True."
            )
        self._strict = False

    def _ddp_graph_static(self) -> bool:
        """Whether all reduced backwards have reached the same parameters of this rank."""
        return self._constancy.is_static

    def _get_local_used_map(self) -> Tensor:
        """On how many ranks the last reduced backward used each parameter.

        Returns:
            int32, one element for each parameter that requires a gradient, by its index.
        """
        counts: dict[Parameter, int] = {}
        for index, (params, flags) in enumerate(self.arrangement.flags()):
            if index not in self._left_out:
                counts.update(zip(params, flags.tolist(), strict=True))
        params = [param for _, param in self._roster.trainable]
        return torch.tensor(
            [round(counts.get(param, 0)) for param in params],
            dtype=torch.int32,
            device=params[0].device,
        )

    def set_logger(self, logger: Logger) -> None:
        """Errors that a backward ends with are noted there. It is referred to weakly."""
        self._logger = weakref.ref(logger)

    def _note(self, error: Exception) -> None:
        logger = self._logger()
        if logger is not None:
            logger.set_error_and_log(str(error))

    def _rebuild_buckets(self) -> bool:
        """Buckets are rebuilt at the end of a backward, never here."""
        return False

    def _push_all_rebuilt_params(self) -> None:
        """Nothing: stock is told the order of gradients that its hooks have not seen."""

    def _delay_all_reduce(self) -> None:
        """Nothing: the first backward launches its buckets at its end in any case."""

    def _set_forward_pass_work_handle(
        self, work: dist.Work, use_static_world_size: bool
    ) -> NoReturn:
        """See :meth:`refuse_to_be_told`: what was issued is not all that ranks wait for."""
        self.refuse_to_be_told()

    def refuse_to_be_told(self) -> NoReturn:
        """A forward that is not ours tells ranks without inputs, in stock's way, that it begins.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"{self._where()}: inside join() a forward tells the ranks that have no inputs left "
            "which collectives it will bring, before all of them. A subclass with a forward of "
            "its own must leave that to tritonddp: call self._pre_forward(*inputs, **kwargs) "
            "before the module and self._post_forward(output) after it, not what stock does there"
        )

    def _set_sparse_metadata(self, global_unique_ids: Any) -> None:
        """Nothing: which rows a sparse gradient has is seen in the gradient."""

    def _run_comm_hook(self, bucket: GradBucket) -> Any:
        """A future of what the hook, or else the sum over all ranks, makes of ``bucket``."""
        return (
            self._run_allreduce_hook(bucket) if self._run_hook is None else self._run_hook(bucket)
        )

    def _run_allreduce_hook(self, bucket: GradBucket) -> Any:
        """A future of the sum over all ranks. torch's hooks that step optimizers begin with it."""
        return sum_of(bucket, self._group)

    def _get_zeros_like_grad_buckets(self) -> list[GradBucket]:
        """All buckets, with zeros for gradients."""
        return zeros_like(self.arrangement.placement.buckets)
