"""Training: forwards, backwards, steps, and changes of the network or its wrapper between them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from oracle import Alone
from torch import Tensor, nn

from differential.networks import BLOCKS
from differential.program import Action

if TYPE_CHECKING:
    from differential.player import Player


@dataclass
class Output:
    """The batch of a forward, and the results of the two heads."""

    x: Tensor
    results: tuple[Tensor, Tensor]

    def loss(self, heads: tuple[int, ...] = (0, 1)) -> Tensor:
        """The loss of some of the heads."""
        results = [self.results[head] for head in heads]
        wide = [each if each.dtype is torch.float64 else each.float() for each in results]
        return torch.stack([(each**2).mean() for each in wide]).sum()


class Forward(Action):
    """A wrapped network runs on a new batch, and its output is kept as number ``slot``."""

    slot: int
    rows: tuple[int, ...]  # size of the batch, for each rank
    paths: tuple[tuple[str, ...], ...] | None = None  # blocks, for each rank; None: all
    local: bool = False  # whether it runs under no_sync
    grad: bool = True  # whether it runs with gradients; without, nothing is kept
    training: bool = True  # whether the network is in training mode
    autocast: bool = False  # whether it runs under autocast to bf16
    requires_grad: bool = True  # whether the batch does
    wrapper: str = "main"

    def perform(self, player: Player) -> None:
        net = player.wrapped[self.wrapper]
        x = player.batch(self.rows[player.rank])
        x.requires_grad_(self.requires_grad and self.grad)
        net.train(self.training)
        sync = net.no_sync() if self.local else contextlib.nullcontext()
        low = torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast)
        with sync, low, torch.set_grad_enabled(self.grad):
            output = net(x) if self.paths is None else net(x, self.paths[player.rank])
            results = player.network.results(output)
        if self.grad:
            player.outputs[self.slot] = Output(x, results)
        if player.program.is_hostile or not self.grad:
            player.see("output", results[0])
        player.see_buffers()


class Backward(Action):
    """The backward of the sum of the losses of some outputs."""

    slots: tuple[int, ...] = (0,)  # numbers of the outputs
    heads: tuple[int, ...] = (0, 1)  # which results of each output the losses are made of
    local: bool = False  # whether it only accumulates: it or its latest forward is under no_sync
    outside: bool = False  # whether a local one runs outside of no_sync
    retain_graph: bool = False
    weights: tuple[float, ...] | None = None  # arguments of weighted(), for each rank
    reduction: str = "mean"
    penalty: bool = False  # whether the loss has the square of its gradient for the batch in it
    decayed: str = ""  # the block whose weights are in the loss too, outside of any forward

    def perform(self, player: Player) -> None:
        outputs = [player.outputs[slot] for slot in self.slots]
        loss = torch.stack([each.loss(self.heads) for each in outputs]).sum()
        if self.penalty:
            (gradient,) = torch.autograd.grad(loss, outputs[0].x, create_graph=True)
            loss = loss + gradient.pow(2).sum()
        if self.decayed:
            params = player.network.blocks[self.decayed].parameters()
            squares = [param.abs().square().sum().to(loss.dtype) for param in params]
            loss = torch.stack([loss, *squares]).sum()
        player.see("", loss, "loss")
        del outputs
        with contextlib.ExitStack() as stack:
            # In a wrapped module the forward decides; the oracle needs the context.
            if self.local and (isinstance(player.net, Alone) or not self.outside):
                stack.enter_context(player.net.no_sync())
            if self.weights is not None:
                stack.enter_context(player.net.weighted(self.weights[player.rank], self.reduction))
            loss.backward(retain_graph=self.retain_graph)
        if not self.retain_graph:
            for slot in self.slots:
                del player.outputs[slot]
        if not (self.local and self.weights):  # .grad is not defined then
            player.see_gradients()


def _backward_of_all(player: Player, wrapper: str) -> None:
    output = player.wrapped[wrapper](player.batch())
    output.pow(2).mean().backward()


class Microbatches(Action):
    """Forwards and backwards under ``no_sync``, a different number on each rank."""

    counts: tuple[int, ...]  # for each rank
    wrapper: str = "main"

    def perform(self, player: Player) -> None:
        with player.wrapped[self.wrapper].no_sync():
            for _ in range(self.counts[player.rank]):
                _backward_of_all(player, self.wrapper)
        player.see_gradients()


class QuietSteps(Action):
    """Usual steps, which are not traced."""

    count: int

    def perform(self, player: Player) -> None:
        for _ in range(self.count):
            player.optimizer.zero_grad()
            _backward_of_all(player, "main")
            player.optimizer.step()
        player.optimizer.zero_grad()


class Drop(Action):
    """The output of the first slot is dropped: its forward gets no backward."""

    def perform(self, player: Player) -> None:
        del player.outputs[0]


class ReduceGradients(Action):
    """``reduce_gradients()``: the mean of ``.grad`` now."""

    def perform(self, player: Player) -> None:
        player.net.reduce_gradients()
        player.see_gradients()


class ZeroGrad(Action):
    """Gradients are dropped or filled with zeros, by the optimizer or by the module."""

    set_to_none: bool
    by_optimizer: bool

    def perform(self, player: Player) -> None:
        who = player.optimizer if self.by_optimizer else player.net
        who.zero_grad(set_to_none=self.set_to_none)


class Clip(Action):
    """Gradient clipping, by ``norm`` or by ``value``."""

    by: str

    def perform(self, player: Player) -> None:
        _resolve_conjugates(player)
        if self.by == "value":
            nn.utils.clip_grad_value_(player.net.parameters(), 0.1)
            return
        norm = nn.utils.clip_grad_norm_(player.net.parameters(), 0.5)
        player.see("norm of the gradients", norm.float())


class Step(Action):
    """The optimizer steps."""

    def perform(self, player: Player) -> None:
        _resolve_conjugates(player)
        if player.added:
            player.optimizer.add_param_group({"params": player.added})
            player.added = []
        player.optimizer.step()
        player.see_model()


class Require(Action):
    """A block is frozen or unfrozen."""

    block: str
    grad: bool

    def perform(self, player: Player) -> None:
        player.network.blocks[self.block].requires_grad_(self.grad)


class Replace(Action):
    """A block is replaced by a new one of another kind, on all ranks."""

    block: str
    kind: str

    def perform(self, player: Player) -> None:
        gone = {*player.network.blocks[self.block].parameters()}
        torch.default_generator.manual_seed(player.program.seed + player.number)
        player.network.blocks[self.block] = BLOCKS[self.kind]()
        if player.program.adds_groups:  # the wrapper has them from the next reduction on
            kept = [param for param in player.added if param not in gone]
            player.added = [*kept, *player.network.blocks[self.block].parameters()]
        else:
            _step_with_others(player, gone)


class Convert(Action):
    """The parameters of a block are converted to fp64 and back."""

    block: str
    by: str  # "data", or "overwrite": the parameters are new

    def perform(self, player: Player) -> None:
        block = player.network.blocks[self.block]
        gone = {*block.parameters()}
        player.outputs.clear()  # their graphs hold the old data of parameters
        with converting(self.by):
            block.to(torch.float64).to(torch.float32)
        if self.by == "overwrite":
            _step_with_others(player, gone)


class WrapAgain(Action):
    """The module is wrapped again; some ranks still hold the old wrapper."""

    held_by: tuple[int, ...]
    in_a_cycle: bool = False  # whether the old one is in a reference cycle

    def perform(self, player: Player) -> None:
        old = player.wrapped.pop("main")
        if self.in_a_cycle:
            old.__dict__["trainer"] = [old]
        if player.rank in self.held_by:
            player.old_wrappers.append(old)
        del old
        player.wrapped["main"] = player.wrap(player.network)


class Release(Action):
    """Old wrappers are released."""

    def perform(self, player: Player) -> None:
        player.old_wrappers.clear()
        gc.collect()


def _resolve_conjugates(player: Player) -> None:
    """Torch does not clip or step gradients with the conjugate bit, which stock DDP keeps."""
    for param in player.params:
        if param.grad is not None and param.grad.is_conj():
            param.grad = param.grad.resolve_conj()


def _step_with_others(player: Player, gone: set[nn.Parameter]) -> None:
    """Give the optimizer the current parameters."""
    (group,) = player.optimizer.param_groups
    group["params"] = [*player.network.parameters()]
    for param in gone.difference(group["params"]):
        player.optimizer.state.pop(param, None)


@contextlib.contextmanager
def converting(by: str) -> Iterator[None]:
    """Context: how torch converts parameters: ``"data"``, ``"swap"`` or ``"overwrite"``."""
    future = torch.__future__
    future.set_swap_module_params_on_conversion(by == "swap")
    future.set_overwrite_module_params_on_conversion(by == "overwrite")
    try:
        yield
    finally:
        future.set_swap_module_params_on_conversion(False)
        future.set_overwrite_module_params_on_conversion(False)
