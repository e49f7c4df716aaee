"""Programs that are correct under stock DDP, and difficult for a wrapper.

Stock DDP is the judge: each rank must see the same, bit by bit on two ranks.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from differential.actions import probes, tensors, training
from differential.actions.training import Backward, Forward, Step, ZeroGrad
from differential.kinds.chance import Chance
from differential.networks import AFTER_BRANCHES, BUFFERS
from differential.program import Action, NetworkSpec, Program, given

ROOTS = ("backwards", "buffers", "gradients", "wrappers", "critic", "collectives")
# Roots whose actions some ranks perform alone, or in another order.
_ALONE = {"backwards", "buffers", "critic"}
# Their gradients are of all sizes, and are stored like their parameters.
_BLOCKS = ["linear", "linear", "wide", "normed", "embedding"]


def draw(seed: int, world_size: int) -> Program:
    """The program of ``seed``, the same on all ranks."""
    return _Generator(seed, world_size, "hostile").program()


class _Generator(Chance):
    """Draws a program: the steps of a training, and between them actions of one or two roots.

    It does not draw what stock does not define. No rank bypasses the wrapper in a backward after a
    forward that has armed the reduction, and nothing is written that the backward needs.
    """

    def __init__(self, *seeds: object) -> None:
        super().__init__(*seeds)
        roots = self._random.sample(ROOTS, 2 if self._chance(0.4) else 1)
        if "collectives" in roots:
            roots = [each for each in roots if each not in _ALONE]
        self._roots = tuple(sorted(roots))
        self._collects = "collectives" in roots
        self._has_critic = "critic" in roots
        self._network = self._draw_network()
        self._views = not {"gradients", "critic"} & {*roots} and self._chance(0.15)
        self._is_kept = False  # whether the user has kept gradients

    def program(self) -> Program:
        actions: list[Action] = []
        if not self._has_critic and self._chance(0.3):
            actions.append(training.QuietSteps(self._one_of([2, 5, 12])))
        for _ in range(self._random.randint(3, 5)):
            actions += self._draw_step()
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
            has_critic=self._has_critic,
        )

    # What is wrapped, and how.

    def _draw_network(self) -> NetworkSpec:
        blocks = ["linear", *self._random.choices(_BLOCKS, k=self._random.randint(0, 3))]
        if self._collects:
            blocks = ["linear", *[AFTER_BRANCHES] * self._random.randint(1, 3)]
        if "buffers" not in self._roots and self._chance(0.6):
            return NetworkSpec(tuple(blocks))
        if self._chance(0.4) and not self._collects:
            blocks.append("convolution")
        kinds = self._random.sample(list(BUFFERS), self._random.randint(1, 4))
        return NetworkSpec(tuple(blocks), buffers=tuple(kinds))

    def _draw_options(self) -> dict[str, Any]:
        finds = self._maybe(0.4, False)
        cap = self._maybe(0.5, self._one_of([1e-4, 1e-3, 0.02]))
        if self._collects:
            # A bucket has the three layers between two collectives: stock sends it at the same
            # place for each choice of branches.
            finds = True
            if cap is not None:
                cap = 3 * 8 * 9 * (4 if self._world_size == 2 else 8) / 2**20
        keeps = self._network.has_buffers and self._chance(0.08)
        return given(
            bucket_cap_mb=cap,
            find_unused_parameters=finds,
            gradient_as_bucket_view=True if self._views else None,
            broadcast_buffers=False if keeps else None,
        )

    def _draw_hooks(self) -> tuple[tuple[str, str, bool], ...]:
        if "gradients" not in self._roots:
            return ()
        # A hook that drops the gradient leaves none to other hooks.
        drops = [each for each in tensors.HOOKS if each.startswith("drops")]
        if self._chance(0.2):
            drawn = [self._one_of(drops)]
        else:
            others = [each for each in tensors.HOOKS if each not in drops]
            drawn = self._random.sample(others, self._random.randint(1, 3))
        return tuple(("", hook, self._chance(0.5)) for hook in drawn)

    # What is done with it.

    def _draw_step(self) -> Iterator[Action]:
        """One iteration of a training loop: a step of each wrapper."""
        for title in ("main", "critic") if self._has_critic else ("main",):
            yield from self._interludes("before")
            yield ZeroGrad(self._chance(0.75), by_optimizer=True)
            yield from self._interludes("zeroed")
            yield from self._draw_backward(title)
            yield from self._interludes("after")
            yield Step()
            if self._chance(0.15):
                yield from self._evaluate(title)

    def _draw_backward(self, title: str) -> Iterator[Action]:
        if self._chance(0.2):
            uneven = self._chance(0.6) and not self._collects
            count = self._random.randint(1, 3)
            counts = [self._random.randint(1, 3) if uneven else count for _ in self._ranks]
            yield training.Microbatches(tuple(counts), title)
        if "backwards" in self._roots and title == "main" and self._chance(0.25):
            ways = ["the module", "functional_call"]
            if not self._has_critic:
                ways.append("the parameters")
            yield self._forward(title)
            yield training.Drop()
            yield probes.Probe((1,) * self._world_size, self._one_of(ways), "reduced")
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
        least = 2 if self._network.has_buffers else least
        counts = tuple(self._random.randint(least, 2) for _ in self._ranks)
        return [probes.Saliency(counts, self._one_of(["", "", "blocks.b0"]), title)]

    def _draw_buffers(self, moment: str) -> list[Action]:
        if not self._network.has_buffers:
            return []
        if moment == "between":
            # The backward of BatchNorm needs its buffers.
            has_norm = self._network.has_norm
            return [
                self._draw_write(
                    tensors.UNSEEN if has_norm else tensors.WAYS, len(self._network.buffers)
                )
            ]
        kind = self._random.randrange(4)  # a write, an evaluation, or both
        writes = [self._draw_write()] if kind else []
        return writes + (self._evaluate("main") if kind < 2 else [])

    def _draw_write(self, ways: tuple[str, ...] = tensors.WAYS, count: int = 20) -> Action:
        which = tuple(self._random.randrange(count) for _ in range(self._random.randint(1, 2)))
        return tensors.Write(self._some_ranks(), self._one_of(ways), which)

    def _draw_gradients(self, moment: str) -> list[Action]:
        if moment == "before" and self._is_kept and self._chance(0.7):
            return [tensors.ChangeKept(frees=self._chance(0.5))]
        if moment != "after":
            return []
        actions: list[Action] = [tensors.LookAtMemory()]
        if self._chance(0.3):
            self._is_kept = True
            actions.append(tensors.KeepGradients())
        elif self._chance(0.4):
            ways = ["replaced", "given other data", "scaled in place", "freed"]
            ranks = self._some_ranks() if self._chance(0.3) else tuple(self._ranks)
            actions.append(tensors.ChangeGradients(self._one_of(ways), ranks))
        return actions

    def _draw_wrappers(self, moment: str) -> list[Action]:
        if moment != "before" or self._has_critic:
            return []
        if self._chance(0.3):
            return [training.Release()]
        # Views of an old wrapper that is still held belong to that wrapper.
        held = () if self._views else self._some_ranks(may_be_none=True)
        return [training.WrapAgain(held, in_a_cycle=self._chance(0.4))]
