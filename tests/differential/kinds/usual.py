"""Programs of the usual kind: what is drawn, and what rules it out."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from differential.actions import training
from differential.actions.probes import InputGradient
from differential.actions.tensors import POST_ACCUMULATE, TENSOR
from differential.actions.training import Backward, Forward, ReduceGradients, Step, ZeroGrad
from differential.kinds.chance import Chance
from differential.networks import BLOCKS, OUTPUTS
from differential.player import OPTIMIZERS
from differential.program import Action, NetworkSpec, Program, given

CONVERSIONS = ["data", "overwrite"]
NOT_FP32 = {"linear in fp64", "linear in bf16", "buffered", "complex"}
WEIGHTS = [0.0, 0.25, 1.0, 2.5, 7.0]


def draw(seed: int, world_size: int, steps: int = 0) -> Program:
    """The program of ``seed``, the same on all ranks.

    With ``steps`` it has this number of steps, stock DDP does not play it, and no action keeps more
    memory in each step.
    """
    return _Generator(seed, world_size, steps).program()


class _Generator(Chance):
    """Draws a program.

    Two thirds are defined by stock DDP. The others use what tritonddp supports in addition: several
    backwards, ``no_sync`` only around the backward, weights, ...
    """

    def __init__(self, seed: int, world_size: int, steps: int) -> None:
        super().__init__(seed, world_size, steps)
        self._steps = steps
        self._is_armed = False  # has a forward run outside no_sync since the last reduction?
        self._for_stock = for_stock = self._chance(0.6) and not steps
        self._options = options = self._draw_options()
        is_static = options.get("static_graph", False)
        self._is_strict = options.get("find_unused_parameters") is False and not is_static
        self._network = self._draw_network()
        blocks, frozen = self._network.blocks, self._network.frozen
        self._reentrant = self._network.checkpoint == "reentrant"
        self._is_sparse = "sparse embedding" in blocks
        self._is_complex = "complex" in blocks
        # Whether forwards may leave blocks out. Stock wants a gradient of each sparse parameter.
        needs_all = self._is_strict or (for_stock and (self._reentrant or self._is_sparse))
        self._skips = not needs_all and self._chance(0.6)
        self._autocast = self._chance(0.15)
        hooks = ["allreduce_hook", "ALLREDUCE"]
        if not frozen:  # the first gradients of an unfrozen block do not go through hooks
            hooks.append("noop_hook")
        # In tritonddp sparse gradients do not go through hooks.
        may_hook = not self._is_sparse and self._chance(0.2)
        self._communication_hook = self._one_of(hooks) if may_hook else ""
        # Stock does not wait for delayed gradients, and does not find them after zero_grad.
        fixed = for_stock or self._communication_hook or "b0" in frozen
        self._delays = not fixed and self._chance(0.15)
        fixed = self._communication_hook or self._delays or self._is_strict
        # In join() stock gives unused parameters a gradient of zeros, and never a sparse one.
        fixed = fixed or (for_stock and (self._skips or self._is_sparse)) or is_static
        self._joins = not fixed and self._chance(0.15)
        self._hooks = self._draw_hooks()
        self._hooked = {block for block, _, _ in self._hooks} | ({"b0"} if self._delays else set())
        self._trains = {name: name not in frozen for name in self._network.names}
        self._kinds = dict(zip(self._network.names, blocks, strict=True))
        self._adds = False  # whether this step has added parameters

    def program(self) -> Program:
        actions: list[Action] = []
        ends = [0]  # of the steps
        for number in range(self._steps or self._random.randint(2, 4)):
            actions += self._draw_step(number)
            ends.append(len(actions))
        counts = [self._one_of(ends) for _ in range(self._world_size)]
        counts[self._random.randrange(self._world_size)] = ends[-1]
        # The other optimizers take no sparse gradients.
        optimizers = ["SGD"] if self._is_sparse else [*OPTIMIZERS]
        thresholds = self._one_of([1, 20, 200]), self._one_of([1, 50, 1_048_576])
        return Program(
            "usual",
            self._seed,
            self._world_size,
            self._network,
            self._options,
            tuple(actions),
            optimizer=self._one_of(optimizers),
            hooks=self._hooks,
            thresholds=thresholds if self._chance(0.5) else None,
            stock=self._stock_options() if self._for_stock else None,
            communication_hook=self._communication_hook,
            delays=self._delays,
            counts=tuple(counts) if self._joins else None,
            over_present=self._joins and self._chance(0.3),
        )

    # What is wrapped, and how.

    def _draw_network(self) -> NetworkSpec:
        kinds = list(BLOCKS)
        for kind, chance in {"complex": 0.6, "sparse embedding": 0.3}.items():
            if self._chance(chance):
                kinds.remove(kind)  # it excludes other features
        blocks = self._random.choices(kinds, k=self._random.randint(2, 4))
        tied = self._chance(0.2)
        if tied:
            blocks[:2] = ["linear", "linear"]
        frozen = (f"b{len(blocks) - 1}",) if self._chance(0.2) and len(blocks) > 2 else ()
        checkpoint = self._one_of([""] * 7 + ["not reentrant"] * 2 + ["reentrant"])
        if self._for_stock and (tied or self._options.get("find_unused_parameters")):
            checkpoint = "" if checkpoint == "reentrant" else checkpoint
        output = self._one_of(list(OUTPUTS))
        return NetworkSpec(tuple(blocks), frozen, output, checkpoint, tied)

    def _draw_options(self) -> dict[str, Any]:
        find = self._one_of([None, None, None, True, True, False])
        caps = self._one_of([None, None, 1e-5, 4e-4, 1e-3, 2e-3, 1.0, (3e-4, 2e-3)])
        several = isinstance(caps, tuple)
        return given(
            bucket_cap_mb=None if several else caps,
            bucket_cap_mb_list=caps if several else None,
            find_unused_parameters=find,
            gradient_as_bucket_view=self._one_of([None, True]),
            # For stock all graphs must be the same then: tests/differential/short.
            static_graph=None if self._for_stock else self._maybe(0.2, True),
            batched_grad_copy=self._maybe(0.3, True),
            forward_sync_buffers=self._maybe(0.3, self._chance(0.3)),
            broadcast_buffers=self._maybe(0.08, False),
            init_sync=self._maybe(0.15, False),
            check_finite=None if self._for_stock else self._maybe(0.15, "warn"),
            metrics=self._maybe(0.3, True),
            lazy_bucket_allocation=self._maybe(0.3, True),
        )

    @property
    def _stock_finds(self) -> bool:
        """Whether stock searches the graph: it must, if parameters may be unused."""
        return self._options.get("find_unused_parameters", self._skips)

    def _stock_options(self) -> dict[str, Any]:
        ours = ("metrics", "lazy_bucket_allocation")
        options = {name: value for name, value in self._options.items() if name not in ours}
        return {**options, "find_unused_parameters": self._stock_finds}

    def _draw_hooks(self) -> tuple[tuple[str, str, bool], ...]:
        names = [name for name in self._network.names if name not in self._network.frozen]
        hook = self._one_of(names), self._one_of([TENSOR, POST_ACCUMULATE]), False
        return (hook,) if self._chance(0.25) else ()

    # What is done with it.

    def _draw_step(self, number: int) -> Iterator[Action]:
        """One iteration of a training loop."""
        self._adds = False
        # The graph of a failed backward is kept until the next one.
        yield from self._draw_change(number) or self._draw_conversion()
        weighted = self._reduction_of_weights()
        if weighted:
            yield ZeroGrad(True, False)
        elif self._chance(0.8):
            yield ZeroGrad(self._chance(0.7), self._chance(0.5))
        if self._chance(0.35):
            for _ in range(self._random.randint(1, 2)):
                yield from self._draw_microbatch(weighted)
            if not self._for_stock and not weighted and self._chance(0.1):
                yield ZeroGrad(self._chance(0.5), False)
        if not self._joins and self._chance(0.15):
            forward = self._draw_forward(9)
            yield replace(forward, grad=False, training=self._chance(0.5), local=False)
        yield from self._draw_reduction(number, weighted)
        if self._chance(0.2) and not self._is_sparse:
            by = "norm" if self._is_complex else self._one_of(["norm", "value"])
            yield training.Clip(by)
        yield Step()
        if weighted:
            yield ZeroGrad(True, False)

    def _draw_change(self, number: int) -> list[Action]:
        """A block is frozen, unfrozen or replaced."""
        left_out = {*self._hooked, *(self._network.names[:2] if self._network.tied else ())}
        names = [name for name in self._network.names if name not in left_out]
        fixed = self._joins or self._is_strict or self._reentrant
        if fixed or not names or number == 0 or not self._chance(0.4):
            return []
        block = self._one_of(names)
        if self._for_stock:
            if self._is_sparse:
                return []
            # For stock a parameter that is frozen later is an unused one.
            changes = self._stock_finds and block not in self._network.frozen
            return self._freeze_or_not(block) if changes else []
        if self._communication_hook or self._chance(0.5):
            return self._freeze_or_not(block)
        ruled_out = {"complex"} if self._is_sparse else {"complex", "sparse embedding"}
        kind = self._one_of([kind for kind in BLOCKS if kind not in ruled_out])
        if self._steps:  # of the same size, so that a leak shows
            kind = self._kinds[block]
        self._trains[block], self._kinds[block] = True, kind
        self._adds = True
        return [training.Replace(block, kind)]

    def _draw_conversion(self) -> list[Action]:
        """Parameters are converted and back: stock raises, or continues with the old ones."""
        fp32 = [
            block
            for block, kind in self._kinds.items()
            if kind not in NOT_FP32 and block not in self._hooked and self._trains[block]
        ]
        if self._for_stock or self._joins or self._network.tied or not fp32:
            return []
        if not self._chance(0.4):
            return []
        # First gradients of new parameters do not go through hooks.
        ways = CONVERSIONS[:-1] if self._communication_hook else CONVERSIONS
        return [ZeroGrad(True, False), training.Convert(self._one_of(fp32), self._one_of(ways))]

    def _freeze_or_not(self, block: str) -> list[Action]:
        self._trains[block] = not self._trains[block]
        return [training.Require(block, self._trains[block])]

    def _reduction_of_weights(self) -> str:
        """How the backwards of a step are weighted; ``""`` without weights."""
        post = any(kind == POST_ACCUMULATE for _, kind, _ in self._hooks)
        fixed = self._for_stock or post or self._communication_hook or self._joins
        return "" if fixed or not self._chance(0.3) else self._one_of(["mean", "sum"])

    def _draw_microbatch(self, weighted: str) -> list[Action]:
        """A forward and a backward that accumulate, either or both under ``no_sync``."""
        local = self._for_stock or self._joins or self._chance(0.5)
        forward = replace(self._draw_forward(8), local=local)
        backward = self._backward((8,), self._draw_heads(), weighted, local=True)
        self._is_armed = self._is_armed or not local
        # A backward through weights only has no forward that decides.
        outside = not (self._is_armed or backward.decayed) and self._chance(0.3)
        return [forward, replace(backward, outside=outside)]

    def _draw_reduction(self, number: int, weighted: str) -> list[Action]:
        """Forwards and backwards that are reduced."""
        self._is_armed = False
        actions: list[Action] = [self._draw_forward(0, number)]
        if self._chance(0.1) and not self._reentrant:
            actions[0] = replace(self._draw_forward(0, number), requires_grad=True)
            actions.append(InputGradient(0))
        if self._chance(0.06) and not (self._reentrant or self._joins):
            actions.insert(0, self._draw_forward(7))  # without a backward
        match self._kind_of_reduction(weighted):
            case "one backward of two":
                actions.append(self._draw_forward(1, number))
                actions.append(self._backward((0, 1), self._draw_heads(), weighted))
            case "two backwards":
                actions.append(self._draw_forward(1, number))
                for slot in self._random.sample([0, 1], 2):
                    actions.append(self._backward((slot,), self._draw_heads(), weighted))
            case "two losses":
                for retain in (True, False):
                    backward = self._backward((0,), self._draw_heads(), weighted)
                    actions.append(replace(backward, retain_graph=retain))
            case "on request":
                actions.append(self._backward((0,), self._draw_heads(), "", local=True))
                actions.append(ReduceGradients())
            case _:
                actions.append(self._backward((0,), self._draw_heads(), weighted))
        # The latest forward of a reduced backward is not under no_sync.
        reduced = [each for each in actions if isinstance(each, Backward) and not each.local]
        latest = {max(each.slots) for each in reduced}
        return [
            replace(each, local=False)
            if isinstance(each, Forward) and each.slot in latest
            else each
            for each in actions
        ]

    def _kind_of_reduction(self, weighted: str) -> str:
        kinds = ["one backward"] * 4
        if self._joins:
            return kinds[0]
        if self._for_stock:
            # Stock counts each parameter once in a backward only if it does not search the graph.
            if not (self._stock_finds or self._reentrant):
                kinds.append("one backward of two")
            return self._one_of(kinds)
        kinds.append("one backward of two")
        if not self._adds:
            kinds += ["two backwards", "two losses"]
            if not (weighted or self._is_strict or self._communication_hook):
                kinds.append("on request")
        return self._one_of(kinds)

    def _draw_forward(self, slot: int, number: int | None = None) -> Forward:
        """``number`` of the step, for one whose backward is reduced."""
        paths = self._draw_paths(is_first=number == 0)
        may_be_local = not (self._for_stock or self._joins) and number is not None
        local = may_be_local and self._chance(0.1)
        requires_grad = self._reentrant or self._chance(0.5)
        return Forward(
            slot, self._rows(), paths, local, autocast=self._autocast, requires_grad=requires_grad
        )

    def _draw_paths(self, is_first: bool) -> tuple[tuple[str, ...], ...]:
        # A reentrant checkpoint that is new in a later step is an error.
        skips = self._skips and not (is_first and self._reentrant)
        return tuple(self._draw_path(skips) for _ in range(self._world_size))

    def _draw_path(self, skips: bool) -> tuple[str, ...]:
        names = self._network.names
        count = self._random.randint(0, len(names)) if skips else len(names)
        path = self._random.sample(names, count)
        if path and self._chance(0.15) and not (self._for_stock and self._reentrant):
            path.append(self._one_of(path))
        return tuple(path)

    def _draw_heads(self) -> tuple[int, ...]:
        if not self._skips:
            return (0, 1)
        return self._one_of([(0, 1), (0, 1), (0,), (1,)])

    def _backward(
        self, slots: tuple[int, ...], heads: tuple[int, ...], weighted: str, local: bool = False
    ) -> Backward:
        weights = None
        if weighted:
            weights = tuple(self._random.choices(WEIGHTS, k=self._world_size))
        backward = Backward(slots, heads, local, weights=weights, reduction=weighted or "mean")
        trained = [
            name
            for name in self._network.names
            if self._trains[name] and self._kinds[name] not in ("sparse embedding", "complex")
        ]
        # Stock counts such gradients twice.
        if self._for_stock or self._steps or weighted or not trained:
            return backward
        return replace(backward, decayed=self._maybe(0.15, self._one_of(trained)) or "")

    def _rows(self) -> tuple[int, ...]:
        return tuple(self._random.choices([1, 3, 4], k=self._world_size))
