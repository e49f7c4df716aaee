"""What all ranks must see: one process plays all ranks, without communication.

The oracle computes each tensor from what the ranks of the wrapped model had before it, and a bound
of its rounding error. It continues with the tensors of the ranks: each step is judged separately.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from oracle import Alone, Window, terms_of_mean
from torch import Tensor

from differential.actions.training import Backward, Convert, Forward, ReduceGradients
from differential.networks import Network, build
from differential.player import Player
from differential.program import Program
from differential.trace import Entry, Snapshot, dense

# Half roundings of each term on the way to a mean over three ranks: of the factor, of the product,
# of the sums, of the mean itself; twice that. Weights add factors and sums.
_ROUNDINGS = 4
_ROUNDINGS_OF_WEIGHTED = 16
# What a rank must see, and a bound of the error of each element; None if the tensor is exact.
Expected = tuple[Entry, Tensor | None]


class Oracle:
    """All ranks of a program in one process.

    If they are replicated in place, buffers are synchronized after reductions, not before forwards.
    """

    def __init__(self, program: Program, in_place: bool = False) -> None:
        self._program = program
        ranks = range(program.world_size)
        self._everyone = [Player(program, rank, build(program, 0), Alone) for rank in ranks]
        # As in stock, a module without buffers when it is wrapped never has any synchronized.
        syncs = program.syncs_buffers and any(True for _ in self._everyone[0].network.buffers())
        self.syncs_afterwards = in_place and syncs and not program.counts
        # Whether a forward synchronizes buffers, unless the one before was under no_sync.
        self._syncs_forwards = self._syncs_next_forward = syncs and not self.syncs_afterwards
        self._counts = program.counts or (len(program.actions),) * program.world_size
        # The ranks with inputs.
        self._players = list(self._everyone)
        # Buffers that forwards broadcast, by rank. A forward with gradients finds the buffers of an
        # added block.
        self._broadcast = self._buffers()
        # The parameters of all ranks with a gradient from a backward since the last reduction.
        self._used: set[Tensor] = set()
        # The bounds of the gradients that the last action has reduced.
        self._bounds: dict[str, Tensor | None] = {}

    def perform(self, number: int) -> list[list[Expected]]:
        """What each rank must see of action ``number``: an empty list for a rank without inputs.

        Then call :meth:`adopt` with what the ranks have seen.
        """
        action = self._program.actions[number]
        self._players = [each for each in self._players if self._counts[each.rank] > number]
        if isinstance(action, Forward):
            if action.grad:
                self._broadcast = self._buffers()
            if self._syncs_next_forward:
                self._sync_buffers()
        for player in self._players:
            player.trace = []
            with _reached(player.network) as came:
                player.perform(number)
            if isinstance(action, Backward):
                self._used |= {param for param in came if param.grad is not None}
        if isinstance(action, Forward):
            self._syncs_next_forward = self._syncs_forwards and action.grad and not action.local
        if isinstance(action, Convert):  # converted buffers are new tensors
            self._broadcast = self._buffers()
        self._bounds = {}
        if isinstance(action, Backward) and not action.local:
            self._reduce(action.retain_graph)
        elif isinstance(action, ReduceGradients):
            for player in self._players:
                self._used |= {each for each in player.network.parameters() if each.requires_grad}
            self._reduce()
        return [self._expected(each) if each in self._players else [] for each in self._everyone]

    def finish(self) -> list[list[Expected]]:
        """The end: ``join()`` gives all ranks the model of a rank that left last."""
        for player in self._everyone:
            player.trace = []
            for kind in ("parameters", "buffers") if self._program.counts else ():
                if kind == "parameters" or self._program.syncs_buffers:
                    pairs = zip(player.named(kind), self._players[-1].named(kind), strict=True)
                    for (_, tensor), (_, value) in pairs:
                        tensor.data.copy_(value.data)
            player.finish()
        return [self._expected(player) for player in self._everyone]

    def adopt(self, entries: Sequence[Sequence[Entry]]) -> None:
        """Continue with what each rank has seen of the last action."""
        for player, seen in zip(self._everyone, entries, strict=True):
            params = dict(player.named("parameters"))
            tensors = {
                "parameter": params,
                "buffer": dict(player.named("buffers")),
                "gradient": _gradients_by_name(player),
            }
            for entry in seen:
                mine = tensors.get(entry.kind, {}).get(entry.name)
                if mine is not None and isinstance(entry.seen, Snapshot):
                    value = entry.seen.tensor()
                    if value.is_sparse:
                        params[entry.name].grad = value
                    elif not torch.equal(mine, value):
                        with torch.no_grad():
                            mine.copy_(value)

    def _sync_buffers(self) -> None:
        """Give all ranks the buffers of rank 0, in ``join()`` of the last rank with inputs."""
        source = -1 if self._program.counts else 0
        present = (self._broadcast[player.rank] for player in self._players)
        for buffers in zip(*present, strict=True):
            for buffer in buffers:
                buffer.data.copy_(buffers[source])  # autograd does not see a broadcast either

    def _buffers(self) -> dict[int, list[Tensor]]:
        return {player.rank: list(player.network.buffers()) for player in self._players}

    def _reduce(self, retains_graph: bool = False) -> None:
        """Give all ranks the mean. A retained graph keeps the buffers of its forward."""
        windows = list(zip(*(player.net.windows for player in self._players), strict=True))
        is_weighted = any(window.sums for each in windows for window in each)
        for each in zip(*(player.named("parameters") for player in self._players), strict=True):
            name, params = each[0][0], [param for _, param in each]
            is_used = any(param in self._used and param.grad is not None for param in params)
            sums = [each.sums.get(p) for w in windows for p, each in zip(params, w, strict=True)]
            if not is_used and all(each is None for each in sums):
                continue
            over = len(params) if self._program.over_present else self._program.world_size
            mean, bound = _mean(params, windows, over)
            # On two ranks it is exact: halves are exact, and a sum of two is rounded once.
            exact = self._program.world_size == 2 and not is_weighted
            self._bounds[name] = None if exact else bound
            grads = (*(param.grad for param in params), *sums)
            if any(grad is not None and grad.is_sparse for grad in grads):
                for param in params:
                    param.grad = mean.to_sparse(1)
                continue
            own = self._program.communication_hook == "noop_hook"
            if own:
                self._bounds[name] = None
            for param in params:
                if own and param.grad is not None:
                    continue
                if param.grad is None:
                    param.grad = torch.empty_strided(
                        param.shape, _contract_strides(param), dtype=param.dtype
                    )
                else:
                    # A new tensor: gradients that the user holds do not change.
                    param.grad = param.grad.detach().clone(memory_format=torch.preserve_format)
                param.grad.copy_(torch.zeros_like(mean) if own else mean)
        self._used.clear()
        for player in self._players:
            player.net.windows = []
            player.net._goes_on = False
        if self.syncs_afterwards and not retains_graph:
            self._sync_buffers()

    def _expected(self, player: Player) -> list[Expected]:
        """What the player has seen, with the gradients after the reduction."""
        gradients = _gradients_by_name(player)
        expected: list[Expected] = []
        for entry in player.trace:
            bound = None
            if entry.kind == "gradient":
                value, bound = gradients[entry.name], self._bounds.get(entry.name)
                entry = replace(entry, seen=None if value is None else Snapshot.of(value))
            expected.append((entry, bound))
        return expected


def _contract_strides(param: Tensor) -> tuple[int, ...]:
    """The strides of a new gradient: the parameter's if it is dense, else row-major."""
    # torch keeps the memory order only of a dense tensor.
    like = torch.empty_like(param, device="meta").stride()
    return like if like == param.stride() else torch.empty(param.shape, device="meta").stride()


def _mean(
    params: Sequence[Tensor], windows: Sequence[Sequence[Window]], size: int
) -> tuple[Tensor, Tensor]:
    """The mean of the gradients of one parameter, and a bound of the error of each element.

    The arguments are those of :func:`oracle.terms_of_mean`, for the ranks that have inputs.
    """
    is_weighted = any(window.sums for each in windows for window in each)
    terms = list(map(dense, terms_of_mean(params, windows if is_weighted else [], size)))
    bound = torch.stack([term.abs() for term in terms]).sum(0)
    if is_weighted and bound.numel():
        bound = bound.max().expand_as(bound)  # the sums of a window have rounded too
    info = torch.finfo(params[0].dtype)
    roundings = _ROUNDINGS_OF_WEIGHTED if is_weighted else _ROUNDINGS
    bound = bound * roundings * info.eps
    mean = torch.stack(terms).sum(0).to(params[0].dtype)
    return mean, bound + info.tiny


@contextmanager
def _reached(network: Network) -> Iterator[set[Tensor]]:
    """Context: yield the set of parameters that get a gradient from a backward."""
    came: set[Tensor] = set()
    params = [param for param in network.parameters() if param.requires_grad]
    handles = [param.register_post_accumulate_grad_hook(came.add) for param in params]
    yield came
    for handle in handles:
        handle.remove()


def _gradients_by_name(player: Player) -> dict[str, Tensor | None]:
    return {name: param.grad for name, param in player.named("parameters")}
