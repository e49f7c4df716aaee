"""What a training does: forwards, backwards, steps, and what changes the network between them."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from oracle import Alone
from torch import Tensor, nn

from differential.networks import BLOCKS, Network
from differential.program import Action, Program
from tritonddp import ZeroRedundancyOptimizer

if TYPE_CHECKING:
    from differential.player import Player


class Planned(Exception):
    """A backward that breaks off because the program says so."""


@dataclass
class Output:
    """What a forward has returned: its batch, and the results of the two heads."""

    x: Tensor
    results: tuple[Tensor, Tensor]

    def loss(self, heads: tuple[int, ...] = (0, 1)) -> Tensor:
        """Of some of them."""
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
    around: bool = False  # whether the network itself is called, not its wrapper
    wrapper: str = "main"

    def perform(self, player: Player) -> None:
        net = player.wrapped[self.wrapper]
        x = player.batch(self.rows[player.rank])
        x.requires_grad_(self.requires_grad and self.grad)
        net.train(self.training)
        with contextlib.ExitStack() as stack:
            if self.local:
                stack.enter_context(net.no_sync())
            if self.autocast:
                stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            called = player.network if self.around else net
            output = called(x) if self.paths is None else called(x, self.paths[player.rank])
            results = player.network.results(output)
        if self.grad:
            player.outputs[self.slot] = Output(x, results)
        if player.program.is_hostile or not self.grad:
            player.see("output", results[0])
        player.see_buffers()


class ForwardsInAnyOrder(Action):
    """Each rank runs both of its wrappers, in an order of its own, on one batch."""

    orders: tuple[tuple[int, int], ...]  # for each rank, of its two wrappers

    def perform(self, player: Player) -> None:
        wrappers = list(player.wrapped.values())
        x = player.batch().requires_grad_()
        for number in self.orders[player.rank]:
            results = player.network.results(wrappers[number](x))
            player.outputs[number] = Output(x, results)
        for number in sorted(player.outputs):
            player.see(f"output {number}", player.outputs[number].results[0])


class Backward(Action):
    """The backward of the sum of the losses of some outputs."""

    slots: tuple[int, ...] = (0,)  # numbers of the outputs
    heads: tuple[int, ...] = (0, 1)  # which results of each output the losses are made of
    local: bool = False  # whether it only accumulates: it or its latest forward is under no_sync
    outside: bool = False  # whether it runs outside of no_sync all the same
    retain_graph: bool = False
    weights: tuple[float, ...] | None = None  # for each rank, what weighted is told
    reduction: str = "mean"  # what it is told of the loss
    scaled: bool = False  # whether a gradient scaler scales the loss
    penalty: bool = False  # whether the loss has the square of its gradient for the batch in it
    decayed: str = ""  # the block whose weights are in the loss too, outside of any forward
    inputs: str = ""  # the block whose parameters alone are to get gradients

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
        if self.scaled and player.scaler is not None:
            loss = player.scaler.scale(loss)
        del outputs
        with contextlib.ExitStack() as stack:
            # (The oracle is told what a wrapped module finds out: that the forward decides.)
            if self.local and (isinstance(player.net, Alone) or not self.outside):
                stack.enter_context(player.net.no_sync())
            if self.weights is not None:
                stack.enter_context(player.net.weighted(self.weights[player.rank], self.reduction))
            inputs = [*player.network.blocks[self.inputs].parameters()] if self.inputs else None
            loss.backward(retain_graph=self.retain_graph, inputs=inputs)
        if player.is_manual and not self.local:
            player.wrapper.finalize_backward()
        if not self.retain_graph:
            for slot in self.slots:
                del player.outputs[slot]
        if not (self.local and self.weights):  # what is accumulated then is nobody's business
            player.see_gradients()


def _backward_of_all(player: Player, wrapper: str) -> None:
    output = player.wrapped[wrapper](player.batch())
    player.network.whole(output).pow(2).mean().backward()


class Microbatches(Action):
    """Forwards and backwards under ``no_sync``, as many as each rank has."""

    counts: tuple[int, ...]  # for each rank
    wrapper: str = "main"

    def perform(self, player: Player) -> None:
        with player.wrapped[self.wrapper].no_sync():
            for _ in range(self.counts[player.rank]):
                _backward_of_all(player, self.wrapper)
        player.see_gradients()


class QuietSteps(Action):
    """Usual steps in which nothing is noted down."""

    count: int
    wrapper: str = "main"

    def perform(self, player: Player) -> None:
        for _ in range(self.count):
            player.optimizer.zero_grad()
            _backward_of_all(player, self.wrapper)
            player.optimizer.step()
        player.optimizer.zero_grad()


class Drop(Action):
    """An output is dropped: its forward gets no backward."""

    slot: int = 0

    def perform(self, player: Player) -> None:
        del player.outputs[self.slot]


class ReduceGradients(Action):
    """``reduce_gradients()``: the mean of ``.grad`` now."""

    def perform(self, player: Player) -> None:
        player.net.reduce_gradients()
        player.see_gradients()


class ZeroGrad(Action):
    """Gradients are dropped, or filled with zeros; by the optimizer or by the module."""

    set_to_none: bool
    by_optimizer: bool

    def perform(self, player: Player) -> None:
        who = player.optimizer if self.by_optimizer else player.net
        who.zero_grad(set_to_none=self.set_to_none)


class Hold(Action):
    """Somebody keeps the gradients of a block, which are dropped: they may not change any more."""

    block: str

    def perform(self, player: Player) -> None:
        params = player.network.blocks[self.block].parameters()
        player.held += [param.grad for param in params if param.grad is not None]
        player.net.zero_grad(set_to_none=True)


class Clip(Action):
    """Gradient clipping, by ``norm`` or by ``value``."""

    by: str

    def perform(self, player: Player) -> None:
        _resolve_conjugates(player)
        if player.scaler is not None:
            player.scaler.unscale_(player.optimizer)
        if self.by == "value":
            nn.utils.clip_grad_value_(player.net.parameters(), 0.1)
            return
        norm = nn.utils.clip_grad_norm_(player.net.parameters(), 0.5)
        if player.number in clips_to_rounding(player.program):
            norm = norm.double()
            player.see_gradients()
        player.see("norm of the gradients", norm)


class Step(Action):
    """The optimizer steps, through the gradient scaler if there is one."""

    def perform(self, player: Player) -> None:
        _resolve_conjugates(player)
        player.add_group(player.added)
        if player.scaler is None:
            player.optimizer.step()
        else:
            player.scaler.step(player.optimizer)
            player.scaler.update()
        player.add_group(player.later)
        if player.has_metrics:
            player.ask_metrics()
        player.see_model()


class Halve(Action):
    """Somebody halves the parameters of a block, on every rank."""

    block: str

    def perform(self, player: Player) -> None:
        with torch.no_grad():
            for param in player.network.blocks[self.block].parameters():
                param.mul_(0.5)


class Require(Action):
    """A block is frozen or unfrozen."""

    block: str
    grad: bool

    def perform(self, player: Player) -> None:
        player.network.blocks[self.block].requires_grad_(self.grad)


class Replace(Action):
    """A block is replaced by a new one of another kind, or added, on every rank."""

    block: str
    kind: str

    def perform(self, player: Player) -> None:
        gone = {*player.network.blocks[self.block].parameters()}
        torch.default_generator.manual_seed(player.program.seed + player.number)
        player.network.blocks[self.block] = BLOCKS[self.kind]()
        if player.program.groups:  # the wrapper knows them from the next reduction on
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
        player.forget_outputs()  # whose graphs hold what is behind parameters
        with converting(self.by):
            block.to(torch.float64).to(torch.float32)
        if self.by == "overwrite":
            _step_with_others(player, gone)


class Renew(Action):
    """Another wrapper goes on: a ``copy``, or a new one that loads a ``checkpoint``."""

    by: str

    def perform(self, player: Player) -> None:
        trained = _state_of_optimizer(player)
        if self.by == "copy":
            net = copy.deepcopy(player.net)
            player.go_on_with(net.module, net)
        else:
            trained = self._load(player, trained)
        sizes = [
            [len(group["params"]) for group in groups]
            for groups in (trained["param_groups"], player.optimizer.param_groups)
        ]
        # (Groups that were added are gone.)
        if not player.program.groups or sizes[0] == sizes[1]:
            player.optimizer.load_state_dict(trained)

    def _load(self, player: Player, trained: dict[str, Any]) -> dict[str, Any]:
        saved, network = io.BytesIO(), Network(player.network.spec)
        sent = None if player.wrapper is None else player.wrapper.comm_state_dict()
        torch.save((player.network.state_dict(), trained, sent), saved)
        saved.seek(0)
        values, trained, sent = torch.load(saved, weights_only=True)
        network.load_state_dict(values)
        for mine, its in zip(network.parameters(), player.network.parameters(), strict=True):
            mine.requires_grad_(its.requires_grad)
        player.go_on_with(network, player.wrap(network))
        if player.wrapper is not None:
            player.wrapper.load_comm_state_dict(sent)
        return trained


class BreakOff(Action):
    """A forward and a backward that breaks off on one rank; then all drop their gradients."""

    rows: tuple[int, ...]
    path: tuple[str, ...]
    rank: int
    at: int

    def perform(self, player: Player) -> None:
        block = player.network.blocks[self.path[self.at]]
        breaks = player.rank == self.rank
        with contextlib.ExitStack() as stack:
            if breaks:
                param = next(param for param in block.parameters() if param.requires_grad)
                stack.callback(param.register_hook(_break_off).remove)
            x = player.batch(self.rows[player.rank]).requires_grad_()
            output = Output(x, player.network.results(player.net(x, self.path)))
            try:
                output.loss().backward()
                assert not breaks, "the backward should have broken off"
                if player.is_manual:
                    player.wrapper.finalize_backward()
            except Planned:
                assert breaks
        player.net.zero_grad(set_to_none=True)


def clips_to_rounding(program: Program) -> list[int]:
    """Numbers of the clips whose norm is not torch's, which stock takes: to rounding the same.

    (A sharded optimizer adds up in the order of its groups, torch dtype by dtype.)
    """
    has_groups = program.groups != "all" or any(isinstance(a, Replace) for a in program.actions)
    has_dtypes = any(" in " in kind or kind == "complex" for kind in program.network.blocks)
    if not (program.is_sharded and (has_groups or has_dtypes)):
        return []
    return [number for number, action in enumerate(program.actions) if action == Clip("norm")]


def _resolve_conjugates(player: Player) -> None:
    """Torch clips and steps no gradients with a conjugate bit, which stock DDP leaves."""
    for param in player.params:
        if param.grad is not None and param.grad.is_conj():
            param.grad = param.grad.resolve_conj()


def _step_with_others(player: Player, gone: set[nn.Parameter]) -> None:
    """The optimizer has the parameters that there are."""
    (group,) = player.optimizer.param_groups
    group["params"] = [*player.network.parameters()]
    for param in gone.difference(group["params"]):
        player.optimizer.state.pop(param, None)


def _state_of_optimizer(player: Player) -> dict[str, Any]:
    """Of all ranks' parameters, on each rank."""
    if isinstance(player.optimizer, ZeroRedundancyOptimizer):
        player.optimizer.consolidate_state_dict()
        saved = [player.optimizer.state_dict() if player.rank == 0 else None]
        dist.broadcast_object_list(saved)
        return saved[0]
    return player.optimizer.state_dict()


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


def _break_off(gradient: Tensor) -> None:
    raise Planned
