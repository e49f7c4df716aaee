"""Programs of the usual kind: what is drawn, and what rules it out."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from differential.actions import training
from differential.actions.gradients import POST_ACCUMULATE, TENSOR
from differential.actions.misuse import REFUSED, Misuse
from differential.actions.probes import InputGradient
from differential.actions.training import Backward, Forward, ReduceGradients, Step, ZeroGrad
from differential.kinds.chance import Chance
from differential.networks import BLOCKS, OUTPUTS
from differential.program import Action, NetworkSpec, Options, Program

CONVERSIONS = ["data", "overwrite"]
NOT_FP32 = {"linear in fp64", "linear in bf16", "buffered", "complex"}
WEIGHTS = [0.0, 0.25, 1.0, 2.5, 7.0]


def draw(seed: int, world_size: int, steps: int = 0) -> Program:
    """The program of ``seed``: always the same one, on every rank.

    With ``steps`` it is another one, of so many steps, that stock DDP does not play: wires,
    compression, other wrappers in the midst of it, and nothing that keeps more in each step.
    """
    return _Generator(seed, world_size, steps).program()


class _Generator(Chance):
    """Draws a program.

    Two thirds of them keep to what stock defines. The rest does what this project promises beyond
    that: several backwards, ``no_sync`` around the backward alone, weights, ...
    """

    def __init__(self, seed: int, world_size: int, steps: int) -> None:
        super().__init__(seed, world_size, steps)
        self._steps = steps
        self._is_armed = False  # has a forward run outside no_sync since the last reduction?
        self._for_stock = for_stock = self._chance(0.6) and not steps
        self._options = options = self._draw_options()
        self._is_strict = options.find_unused_parameters is False and not options.static_graph
        # Buckets that stay at home do so on all ranks.
        self._is_alike = bool(options.skip_all_reduce_unused_params)
        self._is_static = for_stock and bool(options.static_graph)
        self._network = self._draw_network(not (for_stock or self._is_strict or self._is_alike))
        blocks, frozen = self._network.blocks, self._network.frozen
        self._reentrant = self._network.checkpoint == "reentrant"
        self._is_sparse = "sparse embedding" in blocks
        self._is_complex = "complex" in blocks
        # Whether forwards may leave blocks out. Stock wants a gradient of each sparse parameter.
        needs_all = self._is_strict or (for_stock and (self._reentrant or self._is_sparse))
        self._skips = not needs_all and self._chance(0.6)
        self._autocast = self._chance(0.15)
        self._scaler = self._chance(0.15) and not (self._is_complex or self._is_sparse)
        hooks = ["allreduce_hook", "ALLREDUCE", "fp16_compress_hook"]
        if not frozen:  # first gradients of what is unfrozen do not go through hooks
            hooks.append("noop_hook")
        # Here sparse gradients do not go through hooks.
        may_hook = not (self._is_alike or self._is_sparse)
        self._communication_hook = self._one_of(hooks) if may_hook and self._chance(0.2) else ""
        # Stock neither waits for delayed gradients nor finds those that zero_grad has dropped.
        fixed = for_stock or self._communication_hook or self._is_alike or "b0" in frozen
        self._delays = not fixed and self._chance(0.15)
        fixed = self._communication_hook or self._delays or self._is_strict or self._is_alike
        # In join() stock gives what nobody used a gradient of zeros, and none that is sparse.
        fixed = fixed or (for_stock and (self._skips or self._is_sparse)) or options.static_graph
        # What ranks see inside join() is kept to the end.
        self._joins = not fixed and self._chance(0.15) and steps <= 30
        self._hooks = self._draw_hooks()
        if steps:
            self._options = replace(options, **self._draw_long_options())
        self._trains = {name: name not in frozen for name in self._network.names}
        self._renews = (
            steps > 0
            and not (self._delays or self._joins or self._communication_hook or self._reentrant)
            and options.process_group is None
            and options.device_mesh is None
        )
        self._kinds = dict(zip(self._network.names, blocks, strict=True))
        self._adds = False  # whether this step has added parameters
        self._paths: tuple[tuple[str, ...], ...] | None = None  # of a static graph

    def program(self) -> Program:
        actions: list[Action] = []
        ends = [0]  # of the steps
        for number in range(self._steps or self._random.randint(2, 4)):
            actions += self._draw_step(number)
            ends.append(len(actions))
        counts = [self._one_of(ends) for _ in range(self._world_size)]
        counts[self._random.randrange(self._world_size)] = ends[-1]
        optimizers = ["SGD", "SGD with momentum", "Adam", "AdamW without foreach"]
        if self._is_sparse:
            del optimizers[1:]  # the others take no sparse gradients
        thresholds = self._one_of([1, 20, 200]), self._one_of([1, 50, 1_048_576])
        # Stock sends stale gradients that nobody used in half precision too, where they are views
        # or belong to an output that its search of the graph saw, and the backward did not.
        in_half = self._communication_hook == "fp16_compress_hook"
        rounds_again = in_half and self._skips
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
            stock=self._stock_options() if self._for_stock and not rounds_again else None,
            communication_hook=self._communication_hook,
            delays=self._delays,
            counts=tuple(counts) if self._joins else None,
            over_present=self._joins and self._chance(0.3),
            scaler=self._scaler,
            is_manual=bool(self._steps) and self._chance(0.25),
        )

    # What is wrapped, and how.

    def _draw_network(self, may_withhold: bool) -> NetworkSpec:
        kinds = [kind for kind in BLOCKS if kind != "withholding" or may_withhold]
        for kind, chance in {"complex": 0.6, "sparse embedding": 0.3}.items():
            if self._chance(chance):
                kinds.remove(kind)  # rules out too much else
        blocks = self._random.choices(kinds, k=self._random.randint(2, 4))
        tied = self._chance(0.2)
        if tied:
            blocks[:2] = ["linear", "linear"]
        frozen = (f"b{len(blocks) - 1}",) if self._chance(0.2) and len(blocks) > 2 else ()
        checkpoint = self._one_of([""] * 7 + ["not reentrant"] * 2 + ["reentrant"])
        if self._for_stock and (tied or self._options.find_unused_parameters):
            checkpoint = "" if checkpoint == "reentrant" else checkpoint
        # Stock's static graph does not look into dataclasses.
        outputs = [kind for kind in OUTPUTS if not (self._is_static and kind == "dataclass")]
        return NetworkSpec(tuple(blocks), frozen, self._one_of(outputs), checkpoint, tied)

    def _draw_options(self) -> Options:
        find = self._one_of([None, None, None, True, True, False])
        caps = self._one_of([None, None, 1e-5, 4e-4, 1e-3, 2e-3, 1.0, (3e-4, 2e-3)])
        several = isinstance(caps, tuple)
        group = self._random.random()
        return Options(
            bucket_cap_mb=None if several else caps,
            bucket_cap_mb_list=caps if several else None,
            find_unused_parameters=find,
            gradient_as_bucket_view=self._one_of([None, True]),
            static_graph=self._maybe(0.12, True),
            batched_grad_copy=self._maybe(0.3, True),
            forward_sync_buffers=self._maybe(0.3, self._chance(0.3)),
            broadcast_buffers=self._maybe(0.08, False),
            init_sync=self._maybe(0.15, False),
            skip_all_reduce_unused_params=self._maybe(0.08, True),
            process_group="new" if group < 0.1 else None,
            device_mesh=True if group > 0.9 else None,
            check_finite=None if self._for_stock else self._maybe(0.15, "warn"),
            metrics=self._maybe(0.3, True),
        )

    def _stock_options(self) -> Options:
        """Stock has to be told whether parameters may be unused."""
        finds = self._options.find_unused_parameters
        if finds is None:
            finds = self._skips and not self._options.static_graph
        return replace(self._options, find_unused_parameters=finds, metrics=None)

    def _draw_long_options(self) -> dict[str, Any]:
        wire = self._one_of([None, None, "float16", "bfloat16"])
        compression = self._one_of([None, "int8"]) if wire is None else None
        plain = bool(self._communication_hook) or self._is_sparse
        return {
            "lazy_bucket_allocation": self._one_of([None, True]),
            "reduce_dtype": None if plain else wire,
            "compression": None if plain else compression,
        }

    def _draw_hooks(self) -> tuple[tuple[str, str, bool], ...]:
        names = [name for name in self._network.names if name not in self._network.frozen]
        # (Who hooks a parameter that gets no gradient finds zeros there.)
        if "withholding" in self._network.blocks:
            return ()
        hook = self._one_of(names), self._one_of([TENSOR, POST_ACCUMULATE]), False
        return (hook,) if self._chance(0.25) else ()

    # What is done with it.

    def _draw_step(self, number: int) -> Iterator[Action]:
        """One iteration of a training loop."""
        self._adds = False
        # The graph of a backward that has broken off is held up to the next one.
        yield from self._draw_change(number) or self._draw_conversion()
        if not (self._for_stock or self._joins) and self._chance(0.2):
            yield Misuse(self._one_of([*REFUSED]), self._some_ranks())
        weighted = self._reduction_of_weights()
        if weighted:
            yield ZeroGrad(True, False)
        elif self._chance(0.8) or (self._for_stock and self._is_alike):
            # Stock divides what lies in a bucket that stays at home, again and again.
            yield ZeroGrad(self._chance(0.7), self._chance(0.5))
        may_accumulate = not (self._is_static or (self._for_stock and self._is_alike))
        if may_accumulate and self._chance(0.35):
            for _ in range(self._random.randint(1, 2)):
                yield from self._draw_microbatch(weighted)
            if not self._for_stock and not weighted and self._chance(0.1):
                yield ZeroGrad(self._chance(0.5), False)
        # Stock's static graph does not synchronize the first backward after one of these.
        if not self._is_static and not self._joins and self._chance(0.15):
            forward = self._draw_forward(9)
            yield replace(forward, grad=False, training=self._chance(0.5), local=False)
        yield from self._draw_reduction(number, weighted)
        if self._chance(0.2) and not self._is_sparse:
            by = "norm" if self._is_complex else self._one_of(["norm", "value"])
            yield training.Clip(by)
        yield Step()
        if weighted:
            yield ZeroGrad(True, False)
        elif not (self._options.gradient_as_bucket_view or self._steps) and self._chance(0.15):
            yield training.Hold(self._one_of(self._network.names))

    def _draw_change(self, number: int) -> list[Action]:
        """A block is frozen, unfrozen or replaced, or a backward breaks off."""
        left_out = {block for block, _, _ in self._hooks} | ({"b0"} if self._delays else set())
        if self._network.tied:
            left_out |= {*self._network.names[:2]}
        names = [name for name in self._network.names if name not in left_out]
        if self._renews and 0 < number < self._steps // 2 and self._chance(0.2):
            return [ZeroGrad(True, False), training.Renew(self._one_of(["copy", "checkpoint"]))]
        fixed = (
            self._is_static or self._joins or self._is_strict or self._reentrant or self._is_alike
        )
        if fixed or not names or number == 0 or not self._chance(0.4):
            return []
        block = self._one_of(names)
        if self._for_stock:
            if self._is_sparse:
                return []
            # Stock takes a parameter that is frozen later for one that is not used.
            finds = self._stock_options().find_unused_parameters
            return self._freeze_or_not(block) if finds and block not in self._network.frozen else []
        match self._random.randrange(1 if self._communication_hook else 3):
            case 0:
                return self._freeze_or_not(block)
            case 1:
                ruled_out = {"complex"} if self._is_sparse else {"complex", "sparse embedding"}
                kind = self._one_of([kind for kind in BLOCKS if kind not in ruled_out])
                if self._steps:  # as large as before, so that what piles up shows
                    kind = self._kinds[block]
                self._trains[block], self._kinds[block] = True, kind
                self._adds = True
                return [training.Replace(block, kind)]
            case _:
                breakable = [name for name in names if self._trains[name]]
                # Not where a custom function may end the backward's way there.
                if not breakable or "withholding" in self._kinds.values():
                    return []
                path = tuple(self._random.sample(breakable, len(breakable)))
                at = self._random.randrange(len(path))
                rank = self._random.randrange(self._world_size)
                return [ZeroGrad(True, False), training.BreakOff(self._rows(), path, rank, at)]

    def _draw_conversion(self) -> list[Action]:
        """Parameters are converted and back, by which stock raises, or goes on with old ones."""
        hooked = {block for block, _, _ in self._hooks} | ({"b0"} if self._delays else set())
        fp32 = [
            block
            for block, kind in self._kinds.items()
            if kind not in NOT_FP32 and block not in hooked and self._trains[block]
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
        """How the backwards of a step are weighted: ``""`` is not at all."""
        post = any(kind == POST_ACCUMULATE for _, kind, _ in self._hooks)
        fixed = self._for_stock or self._scaler or post or self._communication_hook or self._joins
        return "" if fixed or not self._chance(0.3) else self._one_of(["mean", "sum"])

    def _draw_microbatch(self, weighted: str) -> list[Action]:
        """A forward and a backward that accumulate, either or both under ``no_sync``."""
        local = self._for_stock or self._joins or self._chance(0.5)
        forward = replace(self._draw_forward(8), local=local)
        backward = self._backward((8,), self._draw_heads(), weighted, local=True)
        self._is_armed = self._is_armed or not local
        # (What goes through weights alone is local under no_sync: no forward may decide for it.)
        outside = not (self._is_armed or backward.decayed) and self._chance(0.3)
        return [forward, replace(backward, outside=outside)]

    def _draw_reduction(self, number: int, weighted: str) -> list[Action]:
        """Forwards and backwards that are reduced."""
        self._is_armed = False
        actions: list[Action] = [self._draw_forward(0, number)]
        if self._chance(0.1) and not self._reentrant and not self._is_static:
            actions[0] = replace(self._draw_forward(0, number), requires_grad=True)
            actions.append(InputGradient(0))
        fixed = self._reentrant or self._is_static or self._joins
        if self._chance(0.06) and not fixed:
            actions.insert(0, self._draw_forward(7))  # of which nothing becomes
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
                actions[0] = replace(actions[0], around=self._chance(0.5))
                actions.append(self._backward((0,), self._draw_heads(), "", local=True))
                actions.append(ReduceGradients())
            case _:
                actions.append(self._backward((0,), self._draw_heads(), weighted))
        # Where a backward is reduced, the latest of its forwards is not under no_sync.
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
            # Stock takes each parameter for ready once in a backward only if it does not search.
            if not (self._stock_options().find_unused_parameters or self._is_static):
                kinds += [] if self._reentrant else ["one backward of two"]
            return self._one_of(kinds)
        kinds.append("one backward of two")
        if not self._adds:
            kinds += ["two backwards", "two losses"]
            if not (weighted or self._is_strict or self._is_alike or self._communication_hook):
                kinds.append("on request")
        return self._one_of(kinds)

    def _draw_forward(self, slot: int, number: int | None = None) -> Forward:
        """``number`` of the step, for one whose backward is reduced."""
        paths = self._draw_paths(is_first=number == 0)
        if self._is_static:
            paths = self._paths = self._paths or paths
        may_be_local = not (self._for_stock or self._joins) and number is not None
        local = may_be_local and self._chance(0.1)
        requires_grad = self._reentrant or self._chance(0.5)
        return Forward(
            slot, self._rows(), paths, local, autocast=self._autocast, requires_grad=requires_grad
        )

    def _draw_paths(self, is_first: bool) -> tuple[tuple[str, ...], ...]:
        # A reentrant checkpoint that is new in a later step comes too late: an error that says so.
        skips = self._skips and not (is_first and self._reentrant)
        if self._is_alike:
            return (self._draw_path(skips),) * self._world_size
        return tuple(self._draw_path(skips) for _ in range(self._world_size))

    def _draw_path(self, skips: bool) -> tuple[str, ...]:
        names = self._network.names
        count = self._random.randint(0, len(names)) if skips else len(names)
        path = self._random.sample(names, count)
        if path and self._chance(0.15) and not (self._for_stock and self._reentrant):
            path.append(self._one_of(path))
        return tuple(path)

    def _draw_heads(self) -> tuple[int, ...]:
        # Outputs that are not used stock finds neither in a dataclass nor in a static graph.
        hidden = self._for_stock and (self._network.output == "dataclass" or self._is_static)
        if hidden or not self._skips:
            return (0, 1)
        return self._one_of([(0, 1), (0, 1), (0,), (1,)])

    def _backward(
        self, slots: tuple[int, ...], heads: tuple[int, ...], weighted: str, local: bool = False
    ) -> Backward:
        weights = None
        if weighted:
            weights = tuple(self._random.choices(WEIGHTS, k=self._world_size))
        backward = Backward(
            slots, heads, local, weights=weights, reduction=weighted or "mean", scaled=self._scaler
        )
        trained = [
            name
            for name in self._network.names
            if self._trains[name] and self._kinds[name] not in ("sparse embedding", "complex")
        ]
        # (Stock takes such gradients for the second ones of their parameters.)
        if self._for_stock or self._steps or weighted or not trained:
            return backward
        backward = replace(backward, decayed=self._maybe(0.1, self._one_of(trained)) or "")
        # (Where a backward reaches none of them, there is nothing to notice it by.)
        fixed = self._is_strict or self._reentrant or self._delays or self._scaler or self._skips
        inputs = None if fixed else self._maybe(0.1, self._one_of(trained))
        return replace(backward, inputs=inputs or "")

    def _rows(self) -> tuple[int, ...]:
        return tuple(self._random.choices([1, 3, 4], k=self._world_size))
