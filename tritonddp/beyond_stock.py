"""Methods of the wrapper that stock's class does not have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tritonddp.buckets.view_bucket import ViewBucket
from tritonddp.coordination.verify import describe, verify_same
from tritonddp.diagnostics.check_sync import check_sync
from tritonddp.features.join import refuse_inside
from tritonddp.features.weighted_mean import Weight

if TYPE_CHECKING:
    from tritonddp.buckets.parameters import Roster
    from tritonddp.ddp import DistributedDataParallel
    from tritonddp.reducer.reducer import Reducer


class BeyondStock:
    """Means by weight, and of gradients that no ``backward()`` made; reports."""

    if TYPE_CHECKING:
        module: nn.Module
        process_group: dist.ProcessGroup
        device: torch.device
        reducer: Reducer
        parameters_to_ignore: set[str]
        _roster: Roster

    _weight: Weight | None

    @contextmanager
    def weighted(self, n: float | Tensor, reduction: str = "mean") -> Iterator[None]:
        """Context: what a backward inside contributes to the mean over the ranks counts ``n``.

        For batches of different size. The gradients become ``sum_r(n_r g_r) / sum_r(n_r)`` over
        the ranks ``r``: that of a loss which is a mean over the items (samples, tokens) of all
        ranks, where each rank's loss is the mean over its own ``n_r``. Without it each rank counts
        alike, and so the items of a small batch more than those of a large one.

        Several backwards may be accumulated under :meth:`no_sync`, each with its own ``n``: the
        sums then run over all backwards of all ranks, whose number may differ. What counts is
        whether ``backward()`` runs inside. Losses of backwards that were accumulated
        without a weight before belong to the mean, or to the sum, of those that follow.

        Every rank must weight the backward that is reduced. If all weights are zero, so are the
        gradients. Where ranks accumulate different numbers of backwards and the module has buffers,
        which forwards broadcast, run the forwards under :meth:`no_sync` too. Gradients in fp16 have
        room for weights within a hundredfold of the last reduction's, or of 16 in the first.

        Args:
            n: number of items, zero or more, whole or not; or a tensor of one element, which the
                host reads. With ``n=0`` the gradients of a mean do not count, even if they are NaN.
            reduction: how the loss was made of its items. ``"mean"``, or ``"sum"``: then the
                gradients become ``sum_r(g_r) / sum_r(n_r)``, those of a rank with ``n=0`` too.

        Raises:
            RuntimeError: in ``backward()``: some ranks have a weight and some have none; weighted
                and other backwards, or those of means and of sums, are accumulated together; or a
                loss that does not depend on the module's outputs is to be accumulated with others.
            TypeError: ``n`` is no number.
            ValueError: ``n`` is negative or not finite, or ``reduction`` is unknown.

        Example::

            with model.weighted((targets != padding).sum()):
                cross_entropy(model(tokens), targets, ignore_index=padding).backward()
        """
        before, self._weight = self._weight, Weight.of(n, reduction)
        try:
            yield
        finally:
            self._weight = before

    def reduce_gradients(
        self,
        gradients: Sequence[Tensor | None] | Mapping[str, Tensor | None] | None = None,
        params: Iterable[Tensor] | None = None,
    ) -> tuple[Tensor | None, ...] | dict[str, Tensor | None] | None:
        """Average gradients over the ranks now, also under :meth:`no_sync`.

        For gradients that no ``backward()`` made: those of ``torch.autograd.grad``, of second
        order, or made by hand. All ranks must call it for the same parameters. Counts as
        :meth:`weighted` says.

        Args:
            gradients: ``None`` for ``.grad`` of all parameters that require gradients, which is
                overwritten. Or a gradient or ``None`` for each of ``params``, as
                ``torch.autograd.grad`` returns them. Or a mapping from names of parameters, as
                the wrapped module has them, to gradients; one that is missing counts as ``None``.
            params: what the gradients belong to, by default all parameters of the module that
                require gradients, in the order of ``module.parameters()``. That they are alike
                on all ranks is verified by one more small collective.

        Returns:
            ``None`` if ``gradients`` is. Otherwise the means, as a tuple or a dictionary: new
            tensors, which know nothing of the graphs that the gradients came from. ``None`` where
            no rank had a gradient; a rank's ``None`` counts as zero elsewhere.

        Raises:
            RuntimeError: called during a backward or inside :meth:`join`, or the ranks reduce
                different parameters.
            TypeError: a gradient or a parameter is no tensor.
            ValueError: the gradients do not fit the parameters in number, name, shape or dtype.
            FloatingPointError: with ``check_finite="raise"``, a gradient is not finite on a rank.

        Example::

            penalty = sum(g.square().sum() for g in grad(loss, params, create_graph=True))
            means = model.reduce_gradients(grad(loss + penalty, params))
        """
        refuse_inside(cast("DistributedDataParallel", self), "reduce_gradients()")
        if gradients is None:
            if params is not None:
                raise ValueError("params without gradients: give the gradients too")
            self.reducer.reduce_window(self._weight)
            return None
        if not isinstance(gradients, Mapping | Sequence) or isinstance(gradients, str | bytes):
            raise TypeError(
                "gradients should be a tuple or a list of tensors, or tensors by name, got "
                f"{gradients!r}"
            )
        named = self._named(params)
        if params is not None:  # or sizes that differ would end a process
            options = {"gradients": "of reduce_gradients()"}
            step = self.reducer.counters.reductions
            where = f"rank {self.process_group.rank()}, step {step}, reduce_gradients()"
            verify_same(describe(named, [], options), self.process_group, self.device, where)
        if isinstance(gradients, Mapping):
            unknown = sorted(map(str, set(gradients) - {name for name, _ in named}))
            if unknown:
                raise ValueError(
                    f"gradients for {', '.join(unknown[:10])}, which are no parameters of the "
                    "module that require gradients"
                )
            means = self._reduce(named, [gradients.get(name) for name, _ in named])
            return {name: mean for (name, _), mean in zip(named, means, strict=True)}
        return tuple(self._reduce(named, list(gradients)))

    def check_sync(self, *, buffers: bool | None = None, gradients: bool | None = None) -> None:
        """Verify that all ranks hold the same parameters, buffers and gradients, bit for bit.

        All ranks must call it, between two steps or wherever they suspect each other: it changes
        nothing, and after its error training may go on. Two small collectives, and some passes over
        the memory of all that is compared. Checksums of 64 bits are compared, which for different
        tensors are alike in one of 2^64 cases. A NaN equals the same NaN, 0.0 differs from -0.0.

        Parameters and buffers of ``_ddp_params_and_buffers_to_ignore`` are left out.

        Args:
            buffers: ``None`` for all but those that differ by design: the running statistics of
                BatchNorm and InstanceNorm, which each rank's forwards change by its own batches;
                those of SyncBatchNorm are compared. ``True`` for all, ``False`` for none.
            gradients: ``None`` for all that are alike by design: those that the last reduced
                backward has left to parameters that require gradients. Nothing has been added to
                them under :meth:`no_sync` since, on any rank, nor has :meth:`join` given them back.
                ``True`` for all, ``False`` for none. A missing one differs from any other.

        Raises:
            RuntimeError: on every rank, if any two differ, naming the first tensors that do, which
                ranks hold what, and what to do; or if names, shapes or dtypes differ. Also: called
                during a backward or inside :meth:`join`, or a rank does not take part.
            TypeError: an argument is none of these.

        Example::

            optimizer.step()
            if step % 1000 == 0:
                model.check_sync()
        """
        check_sync(cast("DistributedDataParallel", self), buffers, gradients)

    def wire_report(self) -> str:
        """How gradients travel with ``compression="auto"``, and why, in some lines.

        What was measured at construction, on the slowest rank; how long a backward is predicted to
        take if all buckets travel in their own dtype, in bf16 and in int8; and the choice for each.
        It is made after the first reduced backward, whose compute it depends on, and again when
        buckets change and when the first backwards are over. Rank 0 logs it each time that it is
        another one, at level INFO, in the logger ``tritonddp.auto``.
        """
        auto = self.reducer.auto
        if auto is None:
            return (
                'there was no choice: compression is not "auto", or its process group has one rank '
                "or was replaced"
            )
        return auto.report

    def _named(self, params: Iterable[Tensor] | None) -> list[tuple[str, Tensor]]:
        """These parameters with their names, by default all that require gradients."""
        names: dict[Tensor, str] = {param: name for name, param in self.module.named_parameters()}
        if params is not None:
            is_list = isinstance(params, Iterable) and not isinstance(params, Tensor)
            wanted = [*params] if is_list else []
            if not is_list or not all(isinstance(p, Tensor) for p in wanted):
                raise TypeError(f"params should be parameters, one or more, got {params!r}")
            return [(names.get(p, f"parameter {i}"), p) for i, p in enumerate(wanted)]
        return [
            (name, param)
            for param, name in names.items()
            if param.requires_grad and name not in self.parameters_to_ignore
        ]

    def _reduce(
        self, named: Sequence[tuple[str, Tensor]], gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """The means of ``gradients``, which belong to ``named``."""
        if len(gradients) != len(named):
            raise ValueError(f"{len(gradients)} gradients came for {len(named)} parameters")
        # For the parameters, whose own .grad is not at issue.
        stand_ins: list[tuple[str, Any]] = []
        sparse: set[Tensor] = set()
        for (name, param), gradient in zip(named, gradients, strict=True):
            is_sparse = param in self._roster.sparse
            if gradient is not None:
                _check_gradient(name, param, gradient, is_sparse)
            stand_in = param.detach().requires_grad_(param.requires_grad)
            stand_in.grad = None if gradient is None else gradient.detach()
            stand_ins.append((name, stand_in))
            if is_sparse:
                sparse.add(stand_in)
        self.reducer.reduce(stand_ins, ViewBucket, self._weight, sparse)
        return [stand_in.grad for _, stand_in in stand_ins]


def _check_gradient(name: str, param: Tensor, gradient: Any, may_be_sparse: bool) -> None:
    if not isinstance(gradient, Tensor):
        raise TypeError(f"the gradient of {name!r} should be a tensor, got {gradient!r}")
    layout = torch.sparse_coo if may_be_sparse and gradient.is_sparse else torch.strided
    wanted = (tuple(param.shape), param.dtype, param.device, layout)
    found = (tuple(gradient.shape), gradient.dtype, gradient.device, gradient.layout)
    if wanted != found:
        raise ValueError(
            f"the gradient of {name!r} should be {' '.join(map(str, wanted))} like its parameter, "
            f"but is {' '.join(map(str, found))}"
        )
