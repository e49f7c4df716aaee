"""What the ranks of a soak must end with: one process plays them all, without communication."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from soak.network import Data, loss_of, optimizer_of, replace, toggle
from soak.plan import RANKS, Kind, Life, Step
from soak.training import new_network

# In which dtype a hook sends.
_SENT_IN = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Oracle:
    """One network and its optimizer, and the buffers of each rank.

    Args:
        kind: what is trained.
        data: of the soak.
    """

    def __init__(self, kind: Kind, data: Data) -> None:
        self.network = new_network(kind)
        self._dtype = getattr(torch, kind.dtype)
        self._optimizer = optimizer_of(self.network)
        self._data = data
        self.buffers = [[each.clone() for each in self.network.buffers()] for _ in range(RANKS)]
        self._syncs_next_forward = True

    def begin(self) -> None:
        """A wrapper is made: all ranks get the buffers of rank 0."""
        self._syncs_next_forward = True
        self._sync()

    def step(self, step: Step, life: Life) -> None:
        """All ranks make this step."""
        if step.toggles is not None:
            toggle(self.network, step.toggles)
        if step.replaces is not None:
            replace(self.network, self._optimizer, step.replaces)
        if step.evaluates:  # which changes no buffer
            self._sync()
            self._syncs_next_forward = False
        totals = [dict[int, Tensor]() for _ in range(RANKS)]
        last = len(step.blocks) - 1
        for micro in range(last + 1):
            self._sync()
            is_local = micro < last or step.on_request
            self._syncs_next_forward = not is_local
            for rank in range(RANKS):
                self._add(totals[rank], step, micro, rank)
            if step.fails and (step.fails_early or micro == last):
                return
        items = None
        if step.weights is not None:
            items = [sum(each) for each in zip(*step.weights, strict=True)]
        for number, param in enumerate(self.network.parameters()):
            param.grad = self._mean([each.get(number) for each in totals], items, step, life)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _add(self, total: dict[int, Tensor], step: Step, micro: int, rank: int) -> None:
        """The gradients of a microbatch on a rank, times their weight where losses are means."""
        for held, own in zip(self.network.buffers(), self.buffers[rank], strict=True):
            held.copy_(own)
        batch = self._data.batch(step.number, micro, rank, self._dtype)
        loss = loss_of(self.network(batch, step.blocks[micro][rank]), batch, step.reduction)
        for held, own in zip(self.network.buffers(), self.buffers[rank], strict=True):
            own.copy_(held)
        loss.backward()
        scales = step.weights is not None and step.reduction == "mean"
        for number, param in enumerate(self.network.parameters()):
            if param.grad is not None:
                gradient = param.grad * step.weights[micro][rank] if scales else param.grad
                total[number] = total[number] + gradient if number in total else gradient
                param.grad = None

    def _mean(
        self,
        totals: Sequence[Tensor | None],
        items: Sequence[float] | None,
        step: Step,
        life: Life,
    ) -> Tensor | None:
        """Of one parameter, over the ranks. ``None`` where none of them has a gradient."""
        if all(each is None for each in totals):
            return None
        hook = None if step.on_request else life.hook
        divisor = RANKS if items is None else sum(items)
        terms = [each / divisor if divisor else each * 0 for each in totals if each is not None]
        if hook in _SENT_IN:  # it casts before it divides
            terms = [(each * RANKS).to(_SENT_IN[hook]) / RANKS for each in terms]
        elif life.wire and hook is None:
            terms = [each.to(getattr(torch, life.wire)) for each in terms]
        mean = sum(terms[1:], terms[0]).to(self._dtype)
        return mean * RANKS if hook == "sum" else mean

    def _sync(self) -> None:
        if self._syncs_next_forward:
            for first, *others in zip(*self.buffers, strict=True):
                for other in others:
                    other.copy_(first)
