"""The optimizer class."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, ClassVar
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer as Stock
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tritonddp._torch import (
    agree_on_overflow,
    combine_total_norms,
    foreach_norm,
    load_state_dict_post_hooks,
    optimizers_in_backward,
)
from tritonddp.coordination.failures import listed
from tritonddp.coordination.verify import describe, tell_failure, verify_same
from tritonddp.kernels.dispatch import gradient_dtype
from tritonddp.state import DDPState, members
from tritonddp.zero.masters import MasterWeights
from tritonddp.zero.means import OwnedMeans
from tritonddp.zero.partition import add_owners
from tritonddp.zero.state_dict import OwnedState, packed, unpacked, without_idle_copies
from tritonddp.zero.values import OwnedValues

logger = logging.getLogger(__name__)

_NO_JOIN = (
    "ZeroRedundancyOptimizer does not support join(): a rank without inputs would not take part "
    "in its steps. Use a plain optimizer inside join()"
)
_WRAP = "wrap the module with tritonddp.DistributedDataParallel before creating the optimizer"
# Step hook of all optimizers, registered with the first ZeroRedundancyOptimizer.
_hooks: list[Any] = []


class ZeroRedundancyOptimizer(Optimizer):
    """Step each parameter on one rank, its *owner*, so that each rank holds ``1/W`` of the state.

    A drop-in for :class:`torch.distributed.optim.ZeroRedundancyOptimizer`, for the parameters of a
    module wrapped in :class:`tritonddp.DistributedDataParallel`. The wrapper reduces each gradient
    to its owner instead of to all ranks. A step therefore sends as many bytes as without sharding:
    half of an all-reduce for gradients, and as much for the new parameter values. This is stage 1
    of ZeRO (Rajbhandari et al., 2019, arXiv 1910.02054), with whole tensors.

    The owner holds the whole parameter, so that optimizers that work on matrices are supported. On
    other ranks, ``.grad`` is ``None`` after a reduced backward.
    ``torch.nn.utils.clip_grad_norm_`` returns the norm over all owners. ``torch.amp.GradScaler``
    skips a step on all ranks or on none.

    Construct it with the same arguments on all ranks, after wrapping the module. All ranks must
    make the same calls. A wrapper has one such optimizer; a later one replaces it.

    Args:
        params: parameters or parameter groups, as for any optimizer, all from one wrapper.
        optimizer_class: class of the local optimizer, which must step parameters independently of
            each other.
        process_group: the process group of the wrapper, or ``None``.
        parameters_as_bucket_view: accepted, without effect: values are sent in small pieces.
        overlap_with_ddp: accepted, without effect: the backward always reduces gradients.
        master_weights: step fp32 copies of bf16 and fp16 parameters, which only the owners keep,
            and send the rounded values to all ranks. The copies are stepped with ``.grad``; for
            fp32 gradients, set ``grad_dtype`` of the parameters before wrapping the module.
        defaults: arguments of ``optimizer_class``.

    Attributes:
        optim: the local optimizer, with the parameters that this rank owns.

    Raises:
        TypeError: ``params`` are not parameters, or ``optimizer_class`` is not an optimizer class.
        ValueError: parameters belong to no wrapper, or to several; the wrapper does not support
            owners, for example with ``compression``, sparse gradients, a communication hook or
            ``mixed_precision``; or ``process_group`` is not the wrapper's.
        RuntimeError: ranks pass different parameters, groups or optimizer classes, or the
            constructor fails on some ranks.

    Example::

        model = tritonddp.DistributedDataParallel(module)
        params = model.parameters()
        optimizer = tritonddp.ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=1e-3)
        loss_function(model(inputs), targets).backward()
        optimizer.step()
    """

    live: ClassVar[WeakSet[ZeroRedundancyOptimizer]] = WeakSet()  # all instances in this process
    made: ClassVar[int] = 0  # number of instances ever created

    def __init__(
        self,
        params: Any,
        optimizer_class: type[Optimizer],
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        master_weights: bool = False,
        **defaults: Any,
    ) -> None:
        if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
            given = optimizer_class
            if isinstance(given, Optimizer):
                given = f"an instance: pass {type(given).__name__}, and its options by name"
            raise TypeError(f"optimizer_class should be an optimizer class, got {given}")
        if isinstance(params, nn.Module):
            raise TypeError("params should be parameters, got a module: pass model.parameters()")
        if issubclass(optimizer_class, torch.optim.LBFGS):
            raise ValueError(
                "torch.optim.LBFGS needs all parameters together, but each rank holds only some "
                "of them: use it without ZeroRedundancyOptimizer"
            )
        self._is_made = False
        super().__init__(params, defaults)
        self._state = state = _state_of(self._all_params())
        self._core, self._group = state.core, state.core.group
        self._owners: dict[Tensor, int] = {}
        self._masters = MasterWeights() if master_weights else None
        self._consolidated: dict[int, Any] | None = None
        try:
            if process_group is not None and process_group is not self._group.process_group:
                raise ValueError("process_group is not the process group of the wrapper: omit it")
            _check_held(state, self._all_params())
            _check(state, self._named(self._all_params()))
            self._add_owners()
            groups = [self._local_group(group) for group in self.param_groups]
            self.optim = optimizer_class(groups, **defaults)
        except Exception as error:  # possibly only on some ranks, for example owners of vectors
            tell_failure(error, self._group, self._device)
            raise
        self._verify(self.param_groups)
        self._owned = OwnedState(self.optim, self._owners, self._masters, self._group)
        earlier = self._core.events.of(OwnedMeans)
        self._own()
        rank, is_reduced = self._group.rank, bool(self._reduced)
        self._means = OwnedMeans(state.parameters, self._owners, rank, is_reduced, ref(self))
        if earlier is not None:  # this optimizer replaces it
            self._core.events.remove(earlier)
            self._means.take_over(earlier)
        self._core.events.install(self._means)
        self._take_options(self.optim.param_groups, self.param_groups)
        self.state = self.optim.state
        self.defaults = dict(self.optim.defaults)  # schedulers look for momentum in it
        self._is_made, self._known = True, WeakSet[Optimizer]([self, self.optim])
        self.number = ZeroRedundancyOptimizer.made
        ZeroRedundancyOptimizer.made += 1
        self.live.add(self)
        agree_on_overflow(_combine_overflow)
        combine_total_norms(_total_norm)
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_look_at))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters of the same wrapper. All ranks must call it.

        Errors are raised on all ranks and leave the optimizer unchanged.

        Raises:
            ValueError: a parameter belongs to another wrapper, no wrapper, or another group; or its
                gradients cannot have owners, for example sparse gradients.
            RuntimeError: ranks pass different parameters, or the call fails on some ranks.

        Example::

            params, AdamW = list(model.parameters()), torch.optim.AdamW
            optimizer = tritonddp.ZeroRedundancyOptimizer(params[:2], AdamW, lr=1e-3)
            optimizer.add_param_group({"params": params[2:], "lr": 1e-4})
        """
        if not self._is_made:
            super().add_param_group(param_group)
            return
        count, former = len(self.param_groups), set(self._owners)
        try:
            try:
                super().add_param_group(param_group)
                group = self.param_groups[-1]
                self._core.refresh_parameters()
                _check_held(self._state, group["params"])
                _check(self._state, self._named(group["params"]))
                self._add_owners()
                self.optim.add_param_group(self._local_group(group))
            except Exception as error:
                tell_failure(error, self._group, self._device)
                raise
            self._verify([group])
        except BaseException:
            added = self._owners.keys() - former
            if self._masters is not None:
                self._masters.remove(added)
            for param in added:
                del self._owners[param]
            del self.param_groups[count:], self.optim.param_groups[count:]
            raise
        self._own()
        # Options of the other groups may have changed since the last step.
        self._take_options(self.optim.param_groups[-1:], self.param_groups[-1:])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step the parameters that this rank owns, and send the new values to all ranks.

        Args:
            closure: reevaluates the model and returns the loss. Called once.
            kwargs: passed to ``step()`` of the local optimizer.

        Returns:
            The loss that ``closure`` returned, or ``None`` without a closure.

        Raises:
            RuntimeError: called during a backward or inside ``join()``; the wrapper has a new
                process group or another optimizer; or a rank is missing.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        core = self._core
        if not self.is_in_force:
            raise RuntimeError(
                f"{core.where()}: this optimizer is no longer in use, because the wrapper has a "
                "newer ZeroRedundancyOptimizer or a new process group. Pass all parameters to one "
                "optimizer, in groups, or create the optimizer again"
            )
        if self._state.sync.join is not None:
            raise RuntimeError(f"{core.where()}: {_NO_JOIN}")
        core.flush_outside_backward("ZeroRedundancyOptimizer.step() was called during a backward")
        self._consolidated = None
        self._take_options(self.param_groups, self.optim.param_groups)
        if self._masters is not None:
            self._masters.before_step()
        self.optim.step(**kwargs)
        if self._masters is not None:
            self._masters.after_step()
        self._core.reducer.owners_have_stepped()
        self._take_options(self.optim.param_groups, self.param_groups)
        self.state = self.optim.state
        self._values.exchange(f"{core.where()}, optimizer step")
        return loss

    def join_hook(self, **kwargs: Any) -> Any:
        """Not supported.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(f"{self._core.where()}: {_NO_JOIN}")

    # Checkpoints

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the state of all ranks on rank ``to``, for :meth:`state_dict` there.

        All ranks must call it. The state is moved to the CPU.

        Example::

            params = model.parameters()
            optimizer = tritonddp.ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=1e-3)
            loss_function(model(inputs), targets).backward()
            optimizer.step()
            optimizer.consolidate_state_dict(to=0)
            if rank == 0:
                torch.save(optimizer.state_dict(), "optimizer.pt")  # where all ranks can read it
            dist.barrier()
            optimizer.load_state_dict(torch.load("optimizer.pt", weights_only=True))
        """
        if not 0 <= to < self._group.size:
            raise ValueError(f"to should be a rank from 0 to {self._group.size - 1}, got {to}")
        params = self._all_params()
        self._group.recover()
        with self._group.guard(self._core.where(), "consolidate_state_dict(), gathering the state"):
            found = self._owned.gather(params, to, self._device)
        self._consolidated = None if found is None else without_idle_copies(found, params)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parameters in the format of the plain optimizer.

        Raises:
            RuntimeError: :meth:`consolidate_state_dict` was not called since the last step, or with
                another rank as ``to``.
        """
        return packed(self, self._all_state)

    def _all_state(self) -> dict[int, Any]:
        if self._consolidated is None:
            raise RuntimeError(
                f"Optimizer state has not been consolidated on this rank ({self._group.rank}). "
                "Call `consolidate_state_dict(to=rank)` on all ranks, then `state_dict()` on that "
                "rank. Do not use torch.distributed.checkpoint.state_dict, which needs the full "
                "state on all ranks: put the result into what all ranks pass to "
                "torch.distributed.checkpoint.save()"
            )
        return dict(self._consolidated)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of all parameters, saved by this class or by the plain optimizer.

        Each rank keeps the state of the parameters that it owns. The number of ranks may differ
        from the number in the saved run. Hooks run as for any optimizer.

        Raises:
            ValueError: number or sizes of the parameter groups differ.
        """
        state_dict = unpacked(self, state_dict)
        self._owned.load(self.param_groups, state_dict)
        for group, theirs in zip(self.param_groups, state_dict["param_groups"], strict=True):
            names = {**group, **theirs}.get("param_names")
            kept = {"params": group["params"]}
            group.clear()
            group.update(kept if names is None else {**kept, "param_names": list(names)})
        self._take_options(self.optim.param_groups, self.param_groups)
        self.state, self._consolidated = self.optim.state, None
        for after in load_state_dict_post_hooks(self).values():
            after(self)

    # Parameters and groups

    def _all_params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _named(self, params: Iterable[Tensor]) -> list[tuple[str, Tensor]]:
        names: dict[Tensor, str] = {p: name for name, p in self._state.parameters.params}
        return [(names.get(param, "?"), param) for param in params]

    @property
    def _device(self) -> torch.device:
        """Device of small messages."""
        return self._core.manager.current.params[0].device

    def _verify(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise a RuntimeError if the ranks have passed different groups."""
        named = self._named(param for group in groups for param in group["params"])
        alike = {
            "optimizer_class": type(self.optim).__qualname__,
            "group sizes": [len(group["params"]) for group in groups],
            "parameters": [name for name, _ in named],
        }
        where = f"{self._core.where()}, ZeroRedundancyOptimizer"
        verify_same(describe(named, [], alike), self._group, self._device, where)

    def _add_owners(self) -> None:
        """Assign owners to parameters without one.

        Parameters of an earlier optimizer keep their owners, since only these hold the gradients.

        Raises:
            ValueError: the earlier optimizer has other parameters with gradients left to step.
        """
        core = self._core
        core.flush_outside_backward("a ZeroRedundancyOptimizer was created during a backward")
        params = dict.fromkeys(self._all_params())
        # In the order in which gradients become ready; parameters without a bucket go last.
        order = [*(p for p in core.manager.current.params if p in params), *params]
        self._reduced = core.reduced_parameters()  # excludes parameters with owners
        former = core.manager.factory.owners
        left = [name for name, p in self._named(former) if p not in params and p.grad is not None]
        if left and core.reducer.stepped_at < core.counters.reductions:
            raise ValueError(
                f"{core.where()}: the earlier ZeroRedundancyOptimizer still holds gradients of "
                f"{listed(left)}, which only their owners have: step it and call zero_grad(), or "
                "pass all parameters to this optimizer, in groups"
            )
        self._owners.update({p: rank for p, rank in former.items() if p in params})
        add_owners(self._owners, order, self._group.size)

    def _own(self) -> None:
        """Reduce gradients to the owners, and prepare to send values from there."""
        state, rank = self._state, self._group.rank
        # Gradients that all ranks have reduced: keep them on the owner only.
        for param in self._reduced:
            if self._owners.get(param, rank) != rank:
                param.grad = None
        self._core.manager.own(self._owners)
        ranks = range(self._group.size)
        named = self._named(self._all_params())
        of_ranks = [[each for each in named if self._owners[each[1]] == rank] for rank in ranks]
        self._values = OwnedValues(self._group, of_ranks, state.config.transport, state.counters)

    def _local_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        mine = [param for param in group["params"] if self._owners[param] == self._group.rank]
        if self._masters is not None:
            self._masters.add(mine)
            mine = [self._masters.of[param] for param in mine]
        options = {key: group[key] for key in group if key not in ("params", "param_names")}
        return {**options, "params": mine}

    @staticmethod
    def _take_options(source: Sequence[dict[str, Any]], target: Sequence[dict[str, Any]]) -> None:
        """Copy all options, which schedulers, users or the optimizer may change."""
        for one, other in zip(source, target, strict=True):
            for key, value in one.items():
                if key not in ("params", "param_names"):
                    other[key] = value

    # Values combined over owners

    @property
    def is_in_force(self) -> bool:
        """Whether gradients are reduced to the owners of this optimizer rather than a later one."""
        return self._state.core is self._core and self._core.events.of(OwnedMeans) is self._means

    @property
    def is_latest(self) -> bool:
        """Whether no later wrapper holds the parameters."""
        held = {id(param) for _, param in self._state.parameters.params}
        # The wrapper no longer holds parameters of replaced layers.
        first = next((param for param in self._all_params() if id(param) in held), None)
        return first is None or _latest([first]) is self._state

    def owns_any(self, tensors: Iterable[Tensor]) -> bool:
        """Return True if one of ``tensors`` is the gradient of a parameter of this optimizer."""
        grads = {id(param.grad) for param in self._owners if param.grad is not None}
        return any(id(each) in grads for each in tensors)

    def has_any(self, params: Iterable[Tensor]) -> bool:
        """Return True if one of ``params`` belongs to this optimizer, on any rank."""
        return not self._owners.keys().isdisjoint(params)

    def look_at(self, other: Optimizer) -> None:
        """Warn once if another optimizer steps parameters of this one."""
        if other in self._known or not self.is_in_force:
            return
        self._known.add(other)
        params = [param for group in other.param_groups for param in group["params"]]
        if shared := self._named(param for param in params if param in self._owners):
            logger.warning(
                "%s: %s steps %s, which also belong to a ZeroRedundancyOptimizer. Each of their "
                "gradients is on one rank only, so the other ranks cannot step them. Pass each "
                "parameter to only one of the two optimizers. (Shown once.)",
                self._core.where(),
                type(other).__name__,
                listed([name for name, _ in shared]),
            )

    def norms(self, given: dict[int, Tensor], norm_type: float) -> Tensor:
        """Return the norm of each owned gradient in ``given`` on any rank, in optimizer order.

        All ranks must call this. ``given`` maps ids to gradients; the gradients of this optimizer's
        parameters are removed from it.
        """
        params = self._all_params()
        mine: dict[int, Tensor] = {}
        for number, param in enumerate(params):
            grad = None if param.grad is None else given.pop(id(param.grad), None)
            if grad is not None and self._owners[param] == self._group.rank:
                mine[number] = grad
        # A separate element for each norm makes the sum over ranks exact.
        norms = torch.zeros(2, len(params), dtype=torch.float64, device=self._device)
        if mine:
            found = torch.stack(foreach_norm(list(mine.values()), norm_type)).double()
            norms[:, list(mine)] = torch.stack([found, torch.ones_like(found)])
        what = "sum of the gradient norms of all owners"
        self._group.recover()
        self._group.all_reduce(norms, self._core.where(), what)
        is_there = norms[1] != 0
        # Like torch, promote the dtypes of the gradients that exist on any rank.
        there = [param for param, each in zip(params, is_there.tolist(), strict=True) if each]
        dtypes = (gradient_dtype(param).to_real() for param in there or params)
        return norms[0][is_there].to(reduce(torch.promote_types, dtypes))

    def combine_overflow(self, found: dict[Any, Tensor], default: Tensor) -> dict[Any, Tensor]:
        """Return ``found`` combined over the ranks: nonzero if any owner's gradient is not finite.

        See :func:`~tritonddp._torch.agree_on_overflow`.
        """
        if not found:  # this rank owns no gradient
            found = {default.device: default}
        self._group.recover()
        for each in found.values():
            what = "agreement on whether gradients are finite"
            self._group.all_reduce(each, self._core.where(), what, dist.ReduceOp.MAX)
        return found


def _look_at(optimizer: Optimizer, *_: Any) -> None:
    """Pre-step hook of all optimizers."""
    for each in members(ZeroRedundancyOptimizer.live):
        each.look_at(optimizer)


def _combine_overflow(
    optimizer: Any, found: dict[Any, Tensor], default: Tensor
) -> dict[Any, Tensor]:
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        return optimizer.combine_overflow(found, default)
    return found


def _total_norm(
    tensors: Sequence[Tensor], norm_type: float, params: Sequence[Tensor] | None
) -> Tensor | None:
    """Return the norm over all owners, or ``None`` if no such optimizer has these gradients.

    The result is bitwise equal to ``torch.nn.utils.get_total_norm`` of the gradients of all ranks
    in the order of the optimizer.

    Args:
        tensors: gradients; their number may differ by rank.
        params: all parameters, if known; identical on all ranks.
    """
    # If a module was wrapped again, the optimizer of the last wrapper counts.
    in_force = (each for each in members(ZeroRedundancyOptimizer.live) if each.is_in_force)
    live = sorted((each for each in in_force if each.is_latest), key=lambda each: each.number)
    if params is not None:
        optimizers = [each for each in live if each.has_any(params)]
    elif tensors or len(live) > 1:
        optimizers = [each for each in live if each.owns_any(tensors)]
    else:  # this rank owns no gradient
        optimizers = live
    if not optimizers:
        return None
    given = {id(each): each for each in tensors}
    norms = [each.norms(given, norm_type) for each in optimizers]
    if given:
        others = foreach_norm(list(given.values()), norm_type)
        norms.append(torch.stack(others).to(norms[0].device))
    found = torch.cat(norms)
    return torch.linalg.vector_norm(found, norm_type) if len(found) else found.new_zeros(())


def _state_of(params: Sequence[Tensor]) -> DDPState:
    """Return the state of the wrapper of these parameters, including ones added just now."""
    for each in DDPState.all_live():
        each.core.refresh_parameters()
    state = _latest(params[:1])
    if state is None:
        raise ValueError(f"the parameters do not belong to any wrapper of this process: {_WRAP}")
    return state


def _latest(params: Sequence[Tensor]) -> DDPState | None:
    """Return the latest wrapper with these parameters: wrappers may be nested or consecutive."""
    sought = set(map(id, params))
    states = [
        each
        for each in DDPState.all_live()
        if sought.issubset(id(param) for _, param in each.parameters.params)
    ]
    return max(states, key=lambda each: each.parameters.number, default=None)


def _check_held(state: DDPState, params: Sequence[Tensor]) -> None:
    held = {param for _, param in state.parameters.params}
    strange = [tuple(param.shape) for param in params if param not in held]
    if strange:
        raise ValueError(
            f"{len(strange)} of {len(params)} parameters (the first has shape {strange[0]}) do "
            f"not belong to the same wrapper as the others: {_WRAP}, and pass the parameters of "
            "one wrapper"
        )


def _check(state: DDPState, named: Sequence[tuple[str, Tensor]]) -> None:
    """Raise a ValueError if gradients of this wrapper cannot have owners."""
    core, wire = state.core, state.config.wire
    sparse = [name for name, param in named if param in state.parameters.sparse]
    in_backward = [name for name, param in named if optimizers_in_backward(param)]
    reasons = {
        "compression is not supported: use reduce_dtype": wire.compression is not None,
        "communication hooks are not supported": core.comm_hook is not None,
        "mixed_precision is not supported: use torch.autocast": state.low_precision is not None,
        f"gradients of {listed(sparse)} are sparse: use sparse=False": bool(sparse),
        f"optimizers in the backward step {listed(in_backward)}": bool(in_backward),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(f"ZeroRedundancyOptimizer: {reason}")


# Make isinstance(optimizer, torch's class) true.
Stock.register(ZeroRedundancyOptimizer)
