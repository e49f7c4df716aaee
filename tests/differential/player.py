"""One rank plays a scenario: with a wrapped network, or for the oracle with an unwrapped one."""

import contextlib
import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from oracle import Alone
from torch import Tensor, nn

from differential.networks import BLOCKS, Network
from differential.scenario import (
    Action,
    Backward,
    BreakOff,
    Clip,
    Forward,
    Hold,
    InputGradient,
    ReduceGradients,
    Renew,
    Replace,
    Require,
    Scenario,
    Step,
    Swap,
    Write,
    ZeroGrad,
)
from differential.trace import Entry, Snapshot, Trace, dense
from tritonddp import ZeroRedundancyOptimizer
from tritonddp.integrations.in_place import behind

RATE = 0.05
SLOW = 0.001  # so that what goes on for long goes nowhere


class Planned(Exception):
    """A backward that breaks off because the scenario says so."""


class Player:
    """A network in training on one rank.

    Args:
        scenario: what is played.
        rank: as which rank.
        network: before it is wrapped.
        wrap: makes of it what has the methods of a wrapped one.

    Attributes:
        network, net: now; a :class:`Renew` puts others into their places. They are the same where
            the network is replicated in place.
        wrapper: the one of ours that ``net`` is, or that is behind it.
        trace: what was seen so far.
        metrics: what ``metrics()`` has said after each step.
    """

    def __init__(
        self, scenario: Scenario, rank: int, network: Network, wrap: Callable[[Network], Any]
    ) -> None:
        self.scenario = scenario
        self.rank = rank
        self.trace: Trace = []
        self.metrics: list[dict[str, Any]] = []
        self._wrap = wrap
        self._number = 0
        self._begin(network, wrap(network))
        is_ours = self.wrapper is not None
        self._is_manual = is_ours and scenario.is_manual
        self._has_metrics = is_ours and bool(scenario.options.metrics)
        self._outputs: dict[int, tuple[Tensor, tuple[Tensor, Tensor]]] = {}
        self._held: list[Tensor] = []
        self._scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if scenario.scaler else None

    def _begin(self, network: Network, net: Any) -> None:
        self.network, self.net, self.wrapper = network, net, behind(net)
        if self.scenario.is_manual and self.wrapper is not None:
            self.wrapper.require_manual_backward_finalization = True
        self._optimizer = self._make_optimizer()
        for block, kind in self.scenario.hooks:
            _add_hook(next(network.blocks[block].parameters()), kind)

    def _make_optimizer(self) -> Any:
        is_short = self.scenario.actions.count(Step()) < 8
        kind, options = _optimizer(self.scenario.optimizer, RATE if is_short else SLOW)
        params: list[Any] = [*self.network.parameters()]
        of_first, of_heads = (
            [*each.parameters()] for each in (self.network.blocks["b0"], self.network.heads)
        )
        others = {"some": of_first, "later": of_heads, "two": of_heads}
        self._added: list[Tensor] = []
        self._later = of_heads if self.scenario.groups == "later" else []
        left_out = {*others.get(self.scenario.groups, ())}
        params = [param for param in params if param not in left_out]
        if self.scenario.groups == "two":
            params = [{"params": of_heads, "lr": options["lr"] / 2}, {"params": params}]
        if not self.scenario.is_sharded or self.wrapper is None:
            return kind(params, **options)
        self._optimizer = ZeroRedundancyOptimizer(params, kind, **options)
        self._see_owners()
        return self._optimizer

    def _owned(self, param: Tensor) -> bool:
        """Whether the gradient counts on this rank, of all that have it or a part of it."""
        if not isinstance(self._optimizer, ZeroRedundancyOptimizer):
            return True
        return self._optimizer._owners.get(param, 0) == self.rank

    def _add_group(self, params: list[Tensor]) -> None:
        if params:
            self._optimizer.add_param_group({"params": [*params]})
            params.clear()
            self._see_owners()

    def _see_owners(self) -> None:
        if isinstance(self._optimizer, ZeroRedundancyOptimizer):
            owners = self._optimizer._owners
            for name, param in self.network.named_parameters():
                if param in owners:
                    self._see("owner", name, torch.tensor(owners[param]))

    def perform(self, number: int) -> None:
        """Action ``number`` of the scenario."""
        self._number = number
        # Not torch.manual_seed: it takes 1 ms to note its caller for devices that are not there.
        torch.default_generator.manual_seed(
            (self.scenario.seed * 1000 + number) * self.scenario.world_size + self.rank
        )
        self._perform(self.scenario.actions[number])

    def finish(self) -> None:
        """All is done, and ``join()`` left: see the model once more."""
        self._number = len(self.scenario.actions)
        for kind, tensors in (
            ("parameter", self.network.named_parameters()),
            ("buffer", self.network.named_buffers()),
        ):
            for name, tensor in tensors:
                self._see(kind, name, tensor)

    def forget_outputs(self) -> None:
        """Those that nothing becomes of, and their graphs."""
        self._outputs.clear()

    def ask_metrics(self) -> None:
        self.metrics.append(self.net.metrics())

    def _perform(self, action: Action) -> None:
        match action:
            case Forward():
                self._forward(action)
            case Backward():
                self._backward(action)
            case InputGradient(slot):
                x, results = self._outputs[slot]
                (gradient,) = torch.autograd.grad(_loss(results, (0, 1)), x, retain_graph=True)
                self._see("value", "gradient of the input", gradient)
            case ReduceGradients():
                self.net.reduce_gradients()
                self._see_gradients()
            case ZeroGrad(set_to_none, by_optimizer):
                who = self._optimizer if by_optimizer else self.net
                who.zero_grad(set_to_none=set_to_none)
            case Hold(block):
                params = self.network.blocks[block].parameters()
                self._held += [param.grad for param in params if param.grad is not None]
                self.net.zero_grad(set_to_none=True)
            case Clip(by):
                self._clip(by)
            case Step():
                self._step()
            case Write(block):
                with torch.no_grad():
                    for param in self.network.blocks[block].parameters():
                        param.mul_(0.5)
            case Require(block, grad):
                self.network.blocks[block].requires_grad_(grad)
            case Replace(block, kind):
                self._replace(block, kind)
            case Swap(block, by):
                self._swap(self.network.blocks[block], by)
            case Renew(by):
                self._renew(by)
            case BreakOff():
                self._break_off(action)
            case _:
                raise TypeError(f"{action} cannot be played")

    def _replace(self, block: str, kind: str) -> None:
        gone = {*self.network.blocks[block].parameters()}
        torch.default_generator.manual_seed(self.scenario.seed + self._number)
        self.network.blocks[block] = BLOCKS[kind]()
        if self.scenario.groups:  # the wrapper knows them from the next reduction on
            kept = [param for param in self._added if param not in gone]
            self._added = [*kept, *self.network.blocks[block].parameters()]
        else:
            self._step_with_others(gone)

    def _step_with_others(self, gone: set[nn.Parameter]) -> None:
        """The optimizer has the parameters that there are."""
        (group,) = self._optimizer.param_groups
        group["params"] = [*self.network.parameters()]
        for param in gone.difference(group["params"]):
            self._optimizer.state.pop(param, None)

    def _swap(self, block: nn.Module, by: str) -> None:
        gone = {*block.parameters()}
        self.forget_outputs()  # whose graphs hold what is behind parameters
        if by == "swap_tensors":
            param = next(block.parameters())
            torch.utils.swap_tensors(param, nn.Parameter(param.detach().clone()))
            return
        with _converting(by):
            if by == "load_state_dict":
                block.load_state_dict(copy.deepcopy(block.state_dict()))
            else:
                block.to(torch.float64).to(torch.float32)
        if by == "overwrite":
            self._step_with_others(gone)

    def _renew(self, by: str) -> None:
        trained = self._trained()
        if by == "copy":
            net = copy.deepcopy(self.net)
            self._begin(net.module, net)
        else:
            saved, network = io.BytesIO(), Network(self.network.spec)
            sent = None if self.wrapper is None else self.wrapper.comm_state_dict()
            torch.save((self.network.state_dict(), trained, sent), saved)
            saved.seek(0)
            values, trained, sent = torch.load(saved, weights_only=True)
            network.load_state_dict(values)
            for mine, its in zip(network.parameters(), self.network.parameters(), strict=True):
                mine.requires_grad_(its.requires_grad)
            self._begin(network, self._wrap(network))
            if self.wrapper is not None:
                self.wrapper.load_comm_state_dict(sent)
        sizes = [
            [len(group["params"]) for group in groups]
            for groups in (trained["param_groups"], self._optimizer.param_groups)
        ]
        if not self.scenario.groups or sizes[0] == sizes[1]:  # (groups that were added are gone)
            self._optimizer.load_state_dict(trained)

    def _trained(self) -> dict[str, Any]:
        """State of the optimizer, on each rank of all."""
        if isinstance(self._optimizer, ZeroRedundancyOptimizer):
            self._optimizer.consolidate_state_dict()
            saved = [self._optimizer.state_dict() if self.rank == 0 else None]
            dist.broadcast_object_list(saved)
            assert saved[0] is not None
            return saved[0]
        return self._optimizer.state_dict()

    def _forward(self, action: Forward) -> None:
        x = _batch(action.rows[self.rank]).requires_grad_(action.requires_grad and action.grad)
        self.net.train(action.training)
        with contextlib.ExitStack() as stack:
            if action.local:
                stack.enter_context(self.net.no_sync())
            if action.autocast:
                stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
            stack.enter_context(torch.set_grad_enabled(action.grad))
            results = self.network.results(self.net(x, action.paths[self.rank]))
        if action.grad:
            self._outputs[action.slot] = x, results
        else:
            self._see("value", "output", results[0])
        for name, buffer in self.network.named_buffers():
            self._see("buffer", name, buffer)

    def _backward(self, action: Backward) -> None:
        losses = [_loss(self._outputs[slot][1], action.heads) for slot in action.slots]
        loss = torch.stack(losses).sum()
        self._see("loss", "", loss)
        if action.scaled and self._scaler is not None:
            loss = self._scaler.scale(loss)
        with contextlib.ExitStack() as stack:
            # (The oracle is told what a wrapped module finds out: that the forward decides.)
            if action.local and (isinstance(self.net, Alone) or not action.outside):
                stack.enter_context(self.net.no_sync())
            if action.weights is not None:
                stack.enter_context(self.net.weighted(action.weights[self.rank], action.reduction))
            loss.backward(retain_graph=action.retain_graph)
        if self._is_manual and not action.local:
            self.wrapper.finalize_backward()
        if not action.retain_graph:
            for slot in action.slots:
                del self._outputs[slot]
        if not (action.local and action.weights):  # what is accumulated then is nobody's business
            self._see_gradients()

    def _clip(self, by: str) -> None:
        if self._scaler is not None:
            self._scaler.unscale_(self._optimizer)
        if by != "value":
            if by == "own norm" and self.wrapper is not None:
                norm = self.net.clip_grad_norm_(0.5)
            else:
                norm = nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
            if self._number in self.scenario.clips_by_its_own_norm:  # to rounding the same
                norm = norm.double()
                self._see_gradients()
            self._see("value", "norm of the gradients", norm)
        else:
            nn.utils.clip_grad_value_(self.net.parameters(), 0.1)

    def _step(self) -> None:
        self._check_norm()
        self._add_group(self._added)
        if self._scaler is None:
            self._optimizer.step()
        else:
            self._scaler.step(self._optimizer)
            self._scaler.update()
        self._add_group(self._later)
        if self._has_metrics:
            self.ask_metrics()
        for name, param in self.network.named_parameters():
            self._see("parameter", name, param)
        for number, gradient in enumerate(self._held):
            self._see("value", f"gradient {number} that is held", gradient)

    def _break_off(self, action: BreakOff) -> None:
        block = self.network.blocks[action.path[action.at]]
        breaks = self.rank == action.rank
        with _breaking(block) if breaks else contextlib.nullcontext():
            output = self.net(_batch(action.rows[self.rank]).requires_grad_(), action.path)
            loss = _loss(self.network.results(output), (0, 1))
            try:
                loss.backward()
                assert not breaks, "the backward should have broken off"
                if self._is_manual:
                    self.wrapper.finalize_backward()
            except Planned:
                assert breaks
        self.net.zero_grad(set_to_none=True)

    def _check_norm(self) -> None:
        """``grad_norm()`` is the norm of what is in ``.grad``."""
        if self.wrapper is None:
            return
        counted = [param for param in self.network.parameters() if self._owned(param)]
        there = [param.grad for param in counted if param.grad is not None]
        squares = [dense(grad).abs().double().square().sum() for grad in there]
        total = torch.stack(squares).sum() if squares else torch.zeros(()).double()
        if isinstance(self._optimizer, ZeroRedundancyOptimizer):
            dist.all_reduce(total)
        expected = total.sqrt()
        if float(expected) > 1e18:  # where squares are no fp32 torch has infinity too
            return
        found = self.wrapper.grad_norm()
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0, equal_nan=True)

    def _see_gradients(self) -> None:
        self._check_norm()
        for name, param in self.network.named_parameters():
            self._see("gradient", name, param.grad)

    def _see(self, kind: str, name: str, tensor: Tensor | None) -> None:
        seen = None if tensor is None else Snapshot.of(tensor)
        self.trace.append(Entry(self._number, kind, name, seen))


def _batch(rows: int) -> Tensor:
    return torch.randn(rows, 8)


def _loss(results: tuple[Tensor, Tensor], heads: tuple[int, ...]) -> Tensor:
    return torch.stack([(results[head].float() ** 2).mean() for head in heads]).sum()


def _optimizer(name: str, rate: float) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Its class, and its options."""
    match name:
        case "SGD":
            return torch.optim.SGD, {"lr": rate}
        case "SGD with momentum":
            return torch.optim.SGD, {"lr": rate, "momentum": 0.9, "weight_decay": 0.01}
        case "Adam":
            # Its steps follow the signs of tiny gradients: a large eps, or rounding would show.
            return torch.optim.Adam, {"lr": rate, "eps": 0.01}
        case _:
            return torch.optim.AdamW, {"lr": rate, "eps": 0.01, "foreach": False}


def _add_hook(param: Tensor, kind: str) -> None:
    def scale(param: Tensor) -> None:
        if param.grad is not None:
            param.grad.mul_(1.5)

    if kind == "tensor":
        param.register_hook(lambda gradient: None if gradient is None else gradient * 3)
    else:
        param.register_post_accumulate_grad_hook(scale)


@contextlib.contextmanager
def _converting(by: str) -> Iterator[None]:
    """Context: how torch converts parameters: see :class:`differential.scenario.Swap`."""
    future = torch.__future__
    future.set_swap_module_params_on_conversion(by in ("swap", "load_state_dict"))
    future.set_overwrite_module_params_on_conversion(by == "overwrite")
    try:
        yield
    finally:
        future.set_swap_module_params_on_conversion(False)
        future.set_overwrite_module_params_on_conversion(False)


@contextlib.contextmanager
def _breaking(block: nn.Module) -> Iterator[None]:
    """Context: a backward through ``block`` breaks off."""

    def break_off(gradient: Tensor) -> None:
        raise Planned

    param = next(param for param in block.parameters() if param.requires_grad)
    handle = param.register_hook(break_off)
    try:
        yield
    finally:
        handle.remove()
