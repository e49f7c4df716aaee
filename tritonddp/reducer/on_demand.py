"""Reducing gradients that the user has put into ``.grad``, when asked to."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor
from torch.nn import Parameter

from tritonddp.buckets.bucket import Bucket
from tritonddp.buckets.parameters import structure_of
from tritonddp.comm.run import reduce_at_once
from tritonddp.coordination.agreement import Source
from tritonddp.coordination.interrupts import Uninterrupted
from tritonddp.features.weighted_mean import Weight
from tritonddp.reducer.checkpoint import Resumes
from tritonddp.reducer.state import Phase


class OnRequest(Resumes):
    """What ``reduce_gradients()`` asks of a :class:`~tritonddp.reducer.reducer.Reducer`."""

    def reduce(
        self,
        named_params: Sequence[tuple[str, Parameter]],
        bucket_class: type[Bucket],
        weight: Weight | None,
        sparse: Collection[Tensor] = (),
    ) -> None:
        """Average ``.grad`` of these parameters over the ranks, now.

        Args:
            named_params: the same on every rank.
            bucket_class: :class:`ViewBucket` replaces gradients, :class:`Bucket` writes to them.
                (What travels in another dtype is copied by the former too.)
            weight: how much they count; ``None`` where all ranks count alike.
            sparse: those whose gradients may be sparse.

        Raises:
            GradientError: a gradient does not fit its parameter.
            RuntimeError: the ranks do not reduce the same, or a backward is under way.
        """
        self._prepare_for_request()
        if weight is not None and weight.is_sum:
            for _, param in named_params:
                param.grad = None if param.grad is None else param.grad / weight.scale
        for _, param in named_params:
            if param.grad is not None and self._wire.casts(param) and param not in sparse:
                param.grad = param.grad.clone()  # which is written to
        names = [f"sparse {name}" for name, param in named_params if param in sparse]
        structure = structure_of(named_params, *names)
        with self._finite.telling(self._where_requested):
            self._reduce_at_once(named_params, bucket_class, weight, structure, sparse=sparse)

    def reduce_window(self, weight: Weight | None) -> None:
        """Average ``.grad`` of all trainable parameters, and so end what was accumulated.

        Raises:
            RuntimeError: see :meth:`reduce`; or the accumulated backwards have a weight of their
                own beside ``weight``.
        """
        self._prepare_for_request()
        self._roster.enroll()
        self._look()
        self._window.clear_if_dropped()
        if weight is not None and self._window.weight is not None:
            raise RuntimeError(
                f"{self._where()}: the accumulated gradients have the weights of their backwards "
                "already: call reduce_gradients() outside weighted(n)"
            )
        if weight is not None:
            self._window.weight = weight
        params = self._all_params()
        # Frozen since the last reduction, and no backward has used it before: its place in a bucket
        # is there still, and its gradient is no business of this reduction.
        stale = {
            param
            for param, used in zip(self.placement.params, self._used_earlier, strict=True)
            if not used and not param.requires_grad
        }
        used = [param.grad is not None and param not in stale for param in params]
        self._window.divide(params, used)
        # First what is in buckets, which is alike on all ranks: their ballots tell whether what
        # was added since is, too.
        placed = list(zip(self.placement.names, self.placement.params, strict=True))
        with self._finite.telling(self._where_requested):
            for named_params in filter(None, (placed, self._roster.added)):
                self._reduce_at_once(
                    named_params, Bucket, self._window.weight, self._roster.structure, stale
                )
            self._window.clear()
            self.forget_forwards()
            self._used_earlier = [False] * len(self._used_earlier)

    def _where_requested(self) -> str:
        return f"{self._where()}, reduce_gradients()"

    def prepare_to_compare(self) -> set[Tensor]:
        """Whose ``.grad`` is what the last reduction left: alike on all ranks.

        Raises:
            RuntimeError: a backward is under way, or waits for ``finalize_backward()``; or see
                :meth:`prepare_for_forward`.
        """
        self._prepare_for_request("compared")
        self._wait_post_backward()
        if self._phase is Phase.DETACHED or self.counters.reductions == self.own_gradients_at:
            return set()
        pairs = zip(self.placement.params, self._used_earlier, strict=True)
        return {param for param, is_accumulated in pairs if not is_accumulated}

    def _prepare_for_request(self, what: str = "reduced on request") -> None:
        if self._phase is not Phase.IDLE and self._end_is_queued() is not None:
            raise RuntimeError(
                f"{self._where()}: gradients cannot be {what} while a backward runs: wait for its "
                "end"
            )
        self._check_finalized()
        self._recover_all()
        self._settle()

    def _reduce_at_once(
        self,
        named_params: Sequence[tuple[str, Parameter]],
        bucket_class: type[Bucket],
        weight: Weight | None,
        structure: bytes,
        stale: Collection[Parameter] = (),
        sparse: Collection[Tensor] | None = None,
    ) -> None:
        buckets = self._wire.buckets(bucket_class, Bucket)
        placement = self.arrangement.place(named_params, buckets, sparse=sparse)
        used = [param.grad is not None and param not in stale for param in placement.params]
        reduction = self._reduction.plain
        self._begin_reduction(Source.REQUEST, weight, structure, reduction=reduction)
        with Uninterrupted(), self._naming_disagreements(named_params):
            reduce_at_once(placement, reduction, used)
            reduction.settle()
            self._finite.look_at(placement.buckets)
