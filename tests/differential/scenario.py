"""What is done with a network: options, and a list of actions that every rank goes through.

A scenario holds all that differs between ranks as one item for each rank, so that one process can
play them all.
"""

from dataclasses import dataclass, fields

from differential.described import Described, WithActions
from differential.networks import NetworkSpec


@dataclass(frozen=True)
class Options(Described):
    """Arguments of the wrapper, by their names; ``None`` is left out.

    ``process_group`` is ``"new"`` for another group of all ranks, ``device_mesh`` a flag.
    """

    bucket_cap_mb: float | None = None
    bucket_cap_mb_list: tuple[float, ...] | None = None
    find_unused_parameters: bool | None = None
    gradient_as_bucket_view: bool | None = None
    static_graph: bool | None = None
    batched_grad_copy: bool | None = None
    forward_sync_buffers: bool | None = None
    broadcast_buffers: bool | None = None
    init_sync: bool | None = None
    skip_all_reduce_unused_params: bool | None = None
    process_group: str | None = None
    device_mesh: bool | None = None
    check_finite: str | None = None
    metrics: bool | None = None
    lazy_bucket_allocation: bool | None = None
    reduce_dtype: str | None = None
    compression: str | None = None

    @property
    def given(self) -> dict[str, object]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def syncs_buffers(self) -> bool:
        """Whether forwards broadcast buffers."""
        if self.forward_sync_buffers is not None:
            return self.forward_sync_buffers
        return self.broadcast_buffers is not False

    @property
    def syncs_first_buffers(self) -> bool:
        """Whether wrapping does."""
        is_kept = self.forward_sync_buffers is None and self.broadcast_buffers is False
        return self.init_sync is not False and not is_kept


class Action(Described):
    """One thing that every rank does."""


@dataclass(frozen=True)
class Forward(Action):
    """The wrapped module runs on a new batch, and its output is kept as number ``slot``.

    Attributes:
        rows: size of the batch, for each rank.
        paths: blocks that it goes through, for each rank.
        local: whether it runs under ``no_sync``.
        grad: whether it runs with gradients; without, nothing is kept.
        training: whether the module is in training mode.
        autocast: whether it runs under autocast to bf16.
        requires_grad: whether the batch does.
    """

    slot: int
    rows: tuple[int, ...]
    paths: tuple[tuple[str, ...], ...]
    local: bool = False
    grad: bool = True
    training: bool = True
    autocast: bool = False
    requires_grad: bool = True


@dataclass(frozen=True)
class Backward(Action):
    """The backward of the sum of the losses of some outputs.

    Attributes:
        slots: numbers of the outputs.
        heads: which results of each output the losses are made of.
        local: whether it accumulates only, since it or its latest forward runs under ``no_sync``.
        outside: whether it runs outside of ``no_sync`` all the same.
        retain_graph: passed on.
        weights: for each rank, what ``weighted`` is told.
        reduction: what it is told of the loss.
        scaled: whether a gradient scaler scales the loss.
    """

    slots: tuple[int, ...]
    heads: tuple[int, ...] = (0, 1)
    local: bool = False
    outside: bool = False
    retain_graph: bool = False
    weights: tuple[float, ...] | None = None
    reduction: str = "mean"
    scaled: bool = False


@dataclass(frozen=True)
class InputGradient(Action):
    """``autograd.grad`` of the loss of an output for the batch, retaining the graph."""

    slot: int


@dataclass(frozen=True)
class ReduceGradients(Action):
    """``reduce_gradients()``: the mean of ``.grad`` now."""


@dataclass(frozen=True)
class ZeroGrad(Action):
    """Gradients are dropped, or filled with zeros; by the optimizer or by the module."""

    set_to_none: bool
    by_optimizer: bool


@dataclass(frozen=True)
class Hold(Action):
    """Somebody keeps the gradients of a block, which are dropped: they may not change any more."""

    block: str


@dataclass(frozen=True)
class Clip(Action):
    """Gradient clipping, by ``norm``, by the wrapper's ``own norm``, or by ``value``."""

    by: str


@dataclass(frozen=True)
class Step(Action):
    """The optimizer steps, through the gradient scaler if there is one."""


@dataclass(frozen=True)
class Write(Action):
    """Somebody halves the parameters of a block, on every rank."""

    block: str


@dataclass(frozen=True)
class Require(Action):
    """A block is frozen or unfrozen."""

    block: str
    grad: bool


@dataclass(frozen=True)
class Replace(Action):
    """A block is replaced by a new one of another kind, or added, on every rank."""

    block: str
    kind: str


@dataclass(frozen=True)
class Swap(Action):
    """There are other tensors behind the parameters of a block, with the same values.

    Attributes:
        block: that is concerned.
        by: ``"swap_tensors"`` of the first one, ``"load_state_dict"`` that swaps, or a conversion
            to fp64 and back: by ``"data"``, ``"swap"``, or ``"overwrite"``: new parameters.
    """

    block: str
    by: str


@dataclass(frozen=True)
class Renew(Action):
    """Another wrapper goes on: a ``copy``, or a new one that loads a ``checkpoint``."""

    by: str


@dataclass(frozen=True)
class BreakOff(Action):
    """A forward and a backward that breaks off on one rank; then all drop their gradients."""

    rows: tuple[int, ...]
    path: tuple[str, ...]
    rank: int
    at: int


@dataclass(frozen=True)
class Scenario(WithActions):
    """A program for some ranks.

    Attributes:
        seed: of the generator; weights and batches are drawn from it too.
        world_size: number of ranks.
        network: what is wrapped.
        options: of the wrapper.
        communication_hook: a key of :data:`differential.in_ranks.COMMUNICATION_HOOKS`, or ``""``.
        delays: whether the gradients of the first head are delayed until that of the first
            parameter of the first block is there.
        counts: how many of the actions each rank has inputs for, inside ``join()``; ``None`` where
            all have inputs for all, without it.
        over_present: whether the mean there is over the ranks that still have inputs.
        hooks: blocks whose first parameter has a user's hook, and which: ``"tensor"`` multiplies
            the gradient by 3, ``"post-accumulate"`` ``.grad`` by 1.5 in place.
        optimizer: ``"SGD"``, ``"SGD with momentum"``, ``"Adam"`` or ``"AdamW without foreach"``.
        scaler: whether there is a gradient scaler.
        thresholds: of the CPU path, in elements: from which mean size on gradients stay in their
            bucket's memory, and the size of a segment. Small ones bring small networks there.
        stock: options for stock DDP, ``None`` where it does not define the answer.
        actions: what every rank does.
        is_manual: whether backwards end in ``finalize_backward()``.
        groups: what the optimizer is given: ``""`` or ``"all"``: all parameters; ``"two"`` groups;
            ``"some"``: not those of the first block; ``"later"``: those of the heads after the
            first step. Where it is not ``""``, those of a new block are a group that is added.
        is_sharded: whether the optimizer is ours, where the wrapper is.
    """

    seed: int
    world_size: int
    network: NetworkSpec
    options: Options
    communication_hook: str
    delays: bool
    counts: tuple[int, ...] | None
    over_present: bool
    hooks: tuple[tuple[str, str], ...]
    optimizer: str
    scaler: bool
    thresholds: tuple[int, int] | None
    stock: Options | None
    actions: tuple[Action, ...]
    is_manual: bool = False
    groups: str = ""
    is_sharded: bool = False

    @property
    def clips_by_its_own_norm(self) -> list[int]:
        """Numbers of the actions that do, where stock takes torch's: to rounding the same.

        (A sharded optimizer adds up in the order of its groups, torch dtype by dtype.)
        """
        has_groups = self.groups != "all" or any(isinstance(a, Replace) for a in self.actions)
        has_dtypes = any(" in " in kind or kind == "complex" for kind in self.network.blocks)
        others = [Clip("own norm")]
        if self.is_sharded and (has_groups or has_dtypes):
            others.append(Clip("norm"))
        return [number for number, action in enumerate(self.actions) if action in others]

    @property
    def command(self) -> str:
        """What plays it again."""
        kind = " --kind sharded" if self.is_sharded else ""
        return (
            f"python tests/differential/run.py{kind} --seed {self.seed} --world {self.world_size} "
            "-v"
        )
