"""Programs that are correct under stock DDP, and difficult for a wrapper.

Stock DDP is the judge: each rank must see the same, bit by bit on two ranks.
"""

from collections.abc import Iterator
from dataclasses import replace

from differential.actions import buffers, gradients, probes, training, wrapping
from differential.actions.training import Backward, Forward, Step, ZeroGrad
from differential.kinds.chance import Chance
from differential.networks import AFTER_BRANCHES, BUFFERS, COLLECTIVE, UNSEEN, WAYS
from differential.program import Action, NetworkSpec, Options, Program

ROOTS = ("backwards", "buffers", "gradients", "wrappers", "groups", "collectives")
# Roots whose actions some ranks perform alone, or in another order.
_ALONE = {"backwards", "buffers", "groups"}
TWO_GROUPS = "two groups"  # a wrapper with a group for each of two networks
WRAPPERS = ("one network", "local and global", "shared encoder", TWO_GROUPS)
# Their gradients are of all sizes, and are stored like their parameters.
_BLOCKS = ["linear", "linear", "wide", "stacked", "normed", "embedding"]


def draw(seed: int, world_size: int) -> Program:
    """The program of ``seed``, the same on all ranks."""
    return _Generator(seed, world_size, "hostile").program()


class _Generator(Chance):
    """Draws a program: the steps of a training, and between them actions of one or two roots.

    It does not draw what stock does not define. No rank bypasses the wrapper in a backward after a
    forward that has armed the reduction, the second forwards of two groups have the same order on
    all ranks, and nothing is written that the backward needs.
    """

    def __init__(self, *seeds: object) -> None:
        super().__init__(*seeds)
        roots = self._random.sample(ROOTS, 2 if self._chance(0.4) else 1)
        if "collectives" in roots:
            roots = [each for each in roots if each not in _ALONE]
        self._roots = tuple(sorted(roots))
        self._collects = "collectives" in roots
        self._wrappers = "one network"
        if "groups" in roots:
            self._wrappers = self._one_of([TWO_GROUPS, TWO_GROUPS, "shared encoder"])
        elif "wrappers" in roots:
            self._wrappers = self._one_of(["one network", "local and global"])
        self._network = self._draw_network()
        self._views = not {"gradients", "groups"} & {*roots} and self._chance(0.15)
        self._is_kept = False  # whether the user has kept gradients

    def program(self) -> Program:
        actions: list[Action] = []
        if self._wrappers == "local and global":
            actions.append(wrapping.WrapAgain((), "alone", alone=True))
        elif self._wrappers == "one network" and self._chance(0.3):
            actions.append(training.QuietSteps(self._one_of([2, 5, 12])))
        for number in range(self._random.randint(3, 5)):
            actions += self._draw_step(number)
        if "backwards" in self._roots and self._chance(0.2):
            # Last: no forward in which the ranks agree on the buckets of stock follows.
            actions += self._draw_saliency("main", least=1)
        thresholds = self._one_of([1, 20, 200]), self._one_of([1, 50, 1_048_576])
        return Program(
            "hostile",
            self._seed,
            self._world_size,
            self._network,
            self._draw_options(),
            tuple(actions),
            optimizer=self._one_of(["SGD", "SGD", "SGD with momentum"]),
            hooks=self._draw_hooks(),
            thresholds=self._maybe(0.3, thresholds),
            roots=self._roots,
            wrappers=self._wrappers,
        )

    # What is wrapped, and how.

    def _draw_network(self) -> NetworkSpec:
        blocks = ["linear", *self._random.choices(_BLOCKS, k=self._random.randint(0, 3))]
        if self._collects:
            has_branches = self._wrappers == "one network" and self._chance(0.7)
            kind = AFTER_BRANCHES if has_branches else COLLECTIVE
            blocks = ["linear", *[kind] * self._random.randint(1, 3)]
        is_about_buffers = "buffers" in self._roots
        # If ranks differ in the order of their forwards, buffers cannot be broadcast.
        if self._wrappers == TWO_GROUPS or not (is_about_buffers or self._chance(0.4)):
            return NetworkSpec(tuple(blocks))
        if self._chance(0.4) and not self._collects:
            blocks.append("convolution")
        kinds = self._random.sample(list(BUFFERS), self._random.randint(1, 4))
        return NetworkSpec(tuple(blocks), buffers=tuple(kinds))

    def _draw_options(self) -> Options:
        finds = self._maybe(0.4, False)
        cap = self._maybe(0.5, self._one_of([1e-4, 1e-3, 0.02]))
        if self._network.blocks[-1] == AFTER_BRANCHES:
            # A bucket has the three layers between two collectives: stock sends it at the same
            # place for each choice of branches.
            finds = True
            if cap is not None:
                cap = 3 * 8 * 9 * (4 if self._world_size == 2 else 8) / 2**20
        keeps = self._network.has_buffers and self._chance(0.08)
        return Options(
            bucket_cap_mb=cap,
            find_unused_parameters=finds,
            gradient_as_bucket_view=True if self._views else None,
            broadcast_buffers=False if keeps else None,
        )

    def _draw_hooks(self) -> tuple[tuple[str, str, bool], ...]:
        if "gradients" not in self._roots:
            return ()
        # A hook that drops the gradient leaves none to other hooks. In a group of one rank such a
        # gradient is None in tritonddp, and zeros in stock: docs/differences.md.
        drops = [each for each in gradients.HOOKS if each.startswith("drops")]
        if self._wrappers != "local and global" and self._chance(0.2):
            drawn = [self._one_of(drops)]
        else:
            others = [each for each in gradients.HOOKS if each not in drops]
            drawn = self._random.sample(others, self._random.randint(1, 3))
        if self._wrappers == TWO_GROUPS:
            # It is not defined which of two wrappers has ended when a callback of the user runs.
            drawn = [each for each in drawn if not each.startswith("looks")]
        return tuple(("", hook, self._chance(0.5)) for hook in drawn)

    # What is done with it.

    def _draw_step(self, number: int) -> Iterator[Action]:
        """One iteration of a training loop."""
        if self._wrappers == TWO_GROUPS:
            yield from self._draw_step_of("", number)
        elif self._wrappers == "local and global" and self._chance(0.6):
            yield from self._draw_step_of("alone", number)
        else:
            yield from self._draw_step_of("main", number)
            if self._wrappers == "shared encoder":
                yield from self._draw_step_of("critic", number)
            elif self._wrappers == "local and global":
                yield wrapping.Average()

    def _draw_step_of(self, title: str, number: int) -> Iterator[Action]:
        """A step of one wrapper, or without a title of the wrappers of both groups."""
        yield from self._interludes("before")
        yield ZeroGrad(True if not title else self._chance(0.75), by_optimizer=True)
        yield from self._interludes("zeroed")
        if title:
            yield from self._draw_backward(title)
        else:
            # In the second forward the wrappers of stock agree on their buckets.
            orders = [(0, 1) if number == 1 or self._chance(0.5) else (1, 0) for _ in self._ranks]
            yield training.ForwardsInAnyOrder(tuple(orders))
            yield from self._interludes("between")
            yield Backward((0, 1))
        yield from self._interludes("after")
        yield Step()
        if title and self._chance(0.15):
            yield from self._evaluate(title)

    def _draw_backward(self, title: str) -> Iterator[Action]:
        if self._chance(0.2):
            uneven = self._chance(0.6) and title != "alone" and not self._collects
            count = self._random.randint(1, 3)
            counts = [self._random.randint(1, 3) if uneven else count for _ in self._ranks]
            yield training.Microbatches(tuple(counts), title)
        if "backwards" in self._roots and title == "main" and self._chance(0.25):
            ways = ["the module", "functional_call"]
            if self._wrappers != "shared encoder":
                ways.append("the parameters")
            yield self._forward(title)
            yield training.Drop()
            yield probes.BackwardOfTheArmed(self._one_of(ways))
            return
        if self._chance(0.1):
            yield self._forward(title)
            yield training.Drop()
        if "backwards" in self._roots and self._chance(0.25):
            yield from self._draw_saliency(title)
        yield self._forward(title)
        yield from self._interludes("between")
        # The collective of a block has no second derivative.
        penalty = not (self._collects or self._network.has_norm) and self._chance(0.08)
        yield Backward(penalty=penalty)

    def _forward(self, title: str) -> Forward:
        return Forward(0, (6,) * self._world_size, wrapper=title)

    def _evaluate(self, title: str) -> list[Action]:
        forward = replace(self._forward(title), grad=False, training=False)
        return [forward] * self._random.randint(1, 3)

    def _interludes(self, moment: str) -> Iterator[Action]:
        """Actions of the roots.

        ``"before"`` a step, after gradients are ``"zeroed"``, ``"between"`` a forward and its
        backward, or ``"after"`` the backward.
        """
        draw = {
            "backwards": self._draw_backwards,
            "buffers": self._draw_buffers,
            "gradients": self._draw_gradients,
            "wrappers": self._draw_wrappers,
        }
        for root in self._roots:
            if root in draw and self._chance(0.5):
                yield from draw[root](moment)

    # The roots.

    def _draw_backwards(self, moment: str) -> list[Action]:
        if moment == "between":
            return [probes.InputGradient(0, self._some_ranks())]
        ends = list(probes.ENDS)
        if moment == "before":
            ends.remove("left")  # the step drops it
        elif moment == "after":
            ends = ["left", "put aside"]
        counts = self._one_of(
            [
                tuple(int(rank == 0) for rank in self._ranks),
                tuple(self._random.randint(0, 3) for _ in self._ranks),
                (self._random.randint(1, 2),) * self._world_size,
            ]
        )
        way = self._one_of(probes.WAYS)
        return [probes.Probe(counts, way, self._one_of(ends), self._chance(0.3))]

    def _draw_saliency(self, title: str, least: int = 0) -> list[Action]:
        # All ranks run the same number of forwards that broadcast buffers. No other collective may
        # be before the one in which stock agrees on its buckets.
        if self._wrappers not in ("one network", "shared encoder"):
            return []
        least = 2 if self._network.has_buffers else least
        counts = tuple(self._random.randint(least, 2) for _ in self._ranks)
        return [probes.Saliency(counts, self._one_of(["", "", "blocks.b0"]), title)]

    def _draw_buffers(self, moment: str) -> list[Action]:
        if not self._network.has_buffers:
            return []
        if moment == "between":
            # The backward of BatchNorm needs its buffers.
            has_norm = self._network.has_norm
            return [self._draw_write(UNSEEN if has_norm else WAYS, len(self._network.buffers))]
        match self._random.randrange(5):
            case 0:
                return [buffers.Recalibrate(self._some_ranks())]
            case 1:
                return self._evaluate("main")
            case 2:
                return [self._draw_write(), *self._evaluate("main")]
            case _:
                return [self._draw_write()]

    def _draw_write(self, ways: tuple[str, ...] = WAYS, count: int = 20) -> Action:
        which = tuple(self._random.randrange(count) for _ in range(self._random.randint(1, 2)))
        return buffers.Write(self._some_ranks(), self._one_of(ways), which)

    def _draw_gradients(self, moment: str) -> list[Action]:
        if moment == "before" and self._is_kept and self._chance(0.7):
            return [gradients.ChangeKept(frees=self._chance(0.5))]
        if moment != "after":
            return []
        actions: list[Action] = [gradients.LookAtMemory()]
        if self._chance(0.3):
            self._is_kept = True
            actions.append(gradients.KeepGradients())
        elif self._chance(0.4):
            ways = ["replaced", "given other data", "scaled in place", "freed"]
            ranks = self._some_ranks() if self._chance(0.3) else tuple(self._ranks)
            actions.append(gradients.ChangeGradients(self._one_of(ways), ranks))
        return actions

    def _draw_wrappers(self, moment: str) -> list[Action]:
        if moment != "before" or self._wrappers not in ("one network", "local and global"):
            return []
        if self._chance(0.3):
            return [wrapping.Release()]
        # Views of an old wrapper that is still held belong to that wrapper.
        held = () if self._views else self._some_ranks(may_be_none=True)
        return [wrapping.WrapAgain(held, in_a_cycle=self._chance(0.4))]
