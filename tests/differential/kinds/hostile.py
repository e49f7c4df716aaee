"""Programs that are right under stock DDP, as its documentation has it, and hard on a wrapper.

Stock DDP is the judge: what each rank sees is the same, bit by bit on two ranks.
"""

from collections.abc import Iterator
from dataclasses import replace

from differential.actions import buffers, gradients, names, probes, training, wrapping
from differential.actions.modes import MODES, OF_EVALUATIONS, Under
from differential.actions.training import Backward, Forward, Step, ZeroGrad
from differential.kinds.chance import Chance
from differential.networks import BRANCHES, BUFFERS, COLLECTIVES, OVERRIDES, UNSEEN, WAYS
from differential.program import Action, NetworkSpec, Options, Program

ROOTS = (
    *("backwards", "buffers", "gradients", "wrappers", "groups", "names"),
    *("collectives", "modes"),
)
# Of those that some ranks go through alone, or in an order of their own.
_ALONE = {"backwards", "buffers", "groups"}
# What is wrapped; the latter have a group for each wrapper, which ranks take in any order.
OF_GROUPS = ("two groups", "ring of pairs")
WRAPPERS = ("one network", "local and global", "shared encoder", *OF_GROUPS)
# Their gradients are of all sizes, and lie as their parameters do.
_BLOCKS = ["linear", "linear", "wide", "stacked", "functional_call", "normed", "embedding"]
# Actions that may run in a mode.
_USUAL = (
    *(Forward, training.ForwardsInAnyOrder, Backward, training.Microbatches, Step),
    wrapping.WrapAgain,
)


def draw(seed: int, world_size: int) -> Program:
    """The program of ``seed``: always the same one, on every rank."""
    return _Generator(seed, world_size, "hostile").program()


class _Generator(Chance):
    """Draws a program: the steps of a training, and between them what one or two roots add.

    What stock does not define is not drawn. A backward past the wrapper by some ranks may not come
    where a forward has armed the reduction, the second forwards of two groups have one order on all
    ranks, and nothing is written to that the backward needs.
    """

    def __init__(self, *seeds: object) -> None:
        super().__init__(*seeds)
        roots = self._random.sample(ROOTS, 2 if self._chance(0.4) else 1)
        if "collectives" in roots:
            roots = [each for each in roots if each not in _ALONE]
        self._roots = tuple(sorted(roots))
        self._collects = "collectives" in roots
        self._wrappers = self._draw_wrappers_there_are()
        self._network = self._draw_network()
        self._late = Chance(*seeds, "what is decided at wrapping")
        self._draw_what_is_decided_at_wrapping()
        self._views = not {"gradients", "groups"} & {*roots} and self._chance(0.15)
        self._is_kept = False  # has the user kept gradients?
        self._forwards_names = "names" in roots and self._chance(0.5)
        self._names_set: list[str] = []
        self._is_averaged = False  # is there an average to swap in?

    def program(self) -> Program:
        actions: list[Action] = []
        if self._wrappers == "local and global":
            actions.append(wrapping.WrapAgain((), "alone", alone=True))
        elif self._wrappers == "one network":
            actions += self._draw_quiet_steps()
        for number in range(self._random.randint(3, 5)):
            actions += self._draw_step(number)
        # A state that was kept has the old names.
        if self._network.ignored and not self._is_averaged and self._late._chance(0.7):
            places = [place for place, each in enumerate(actions) if each == Step()]
            name = self._network.ignored
            actions.insert(self._late._one_of(places) + 1, wrapping.Rename(name))
        if "backwards" in self._roots and self._chance(0.2):
            # No forward in which the other ranks agree on stock's buckets comes after it.
            actions += self._draw_saliency("main", least=1)
        if "modes" in self._roots:
            if self._wrappers not in OF_GROUPS and self._chance(0.6):
                actions[:0] = self._evaluate("main")
            actions = list(map(self._in_a_mode, actions))
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
            forwards_names=self._forwards_names,
        )

    # What is wrapped, and how.

    def _draw_wrappers_there_are(self) -> str:
        if "groups" in self._roots:
            kinds = ["two groups", "two groups", "shared encoder"]
            if self._world_size == 3 and "names" not in self._roots:
                kinds.append("ring of pairs")
            return self._one_of(kinds)
        if "wrappers" in self._roots:
            return self._one_of(["one network", "local and global"])
        return "one network"

    def _draw_network(self) -> NetworkSpec:
        blocks = ["linear", *self._random.choices(_BLOCKS, k=self._random.randint(0, 3))]
        if self._collects:
            of_branches = self._wrappers == "one network" and self._chance(0.7)
            kinds = [each for each in COLLECTIVES if each.endswith(BRANCHES) is of_branches]
            blocks = ["linear", *[self._one_of(kinds)] * self._random.randint(1, 3)]
        spec = NetworkSpec(tuple(blocks))
        if "names" in self._roots and self._chance(0.5):
            # Ranks that run forwards alone would not hide buffers from the same one on.
            ruled_out = "hides buffers later" if _ALONE & {*self._roots} else ""
            kinds = [each for each in OVERRIDES if each != ruled_out]
            spec = replace(spec, overrides=self._one_of(kinds))
        is_about_buffers = "buffers" in self._roots
        # Where ranks differ in the order of their forwards, buffers may not be broadcast.
        if self._wrappers in OF_GROUPS or not (is_about_buffers or self._chance(0.4)):
            return spec
        kinds = self._random.sample(list(BUFFERS), self._random.randint(1, 4))
        if spec.overrides == "hides buffers later" and "shift" not in kinds:
            kinds.append("shift")  # stock broadcasts no list that has become empty
        if self._chance(0.4) and not self._collects:
            blocks.append("convolution")
        spec = replace(spec, buffers=tuple(kinds), blocks=tuple(blocks))
        if not is_about_buffers:
            return spec
        return replace(
            spec,
            written_in_forward=self._one_of(WAYS) if self._chance(0.3) else "",
            written_in_backward=self._one_of(WAYS) if self._chance(0.3) else "",
            quiet=self._one_of([0, 0, 6, 17, 22]),
        )

    def _draw_what_is_decided_at_wrapping(self) -> None:
        """Outputs that hide tensors, a buffer that comes later, a block that is ignored.

        Nobody asks for a gradient behind a reentrant checkpoint. What one rank alone evaluates
        makes its buffer first. A wrapper of two networks, or another one, ignores other names.
        """
        spec, late = self._network, self._late
        is_plain = self._wrappers == "one network" and not spec.overrides
        if is_plain and not {"collectives", "backwards", "wrappers"} & {*self._roots}:
            hides, ignored = late._chance(0.25), "b0" if late._chance(0.25) else ""
            made_later = not spec.has_buffers and late._chance(0.25)
            self._network = replace(spec, hides=hides, ignored=ignored, made_later=made_later)

    def _draw_options(self) -> Options:
        finds = self._maybe(0.4, False)
        cap = self._maybe(0.5, self._one_of([1e-4, 1e-3, 0.02]))
        if self._network.blocks[-1].endswith(BRANCHES):
            # The three layers between two collectives: where stock sends them is the same for any
            # of the branches.
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
        # One that drops the gradient leaves nothing to look at for others. Where one rank wraps
        # alone, such a gradient is None here, and zeros with stock: docs/differences.md.
        drops = [each for each in gradients.HOOKS if each.startswith("drops")]
        if self._wrappers != "local and global" and self._chance(0.2):
            drawn = [self._one_of(drops)]
        else:
            others = [each for each in gradients.HOOKS if each not in drops]
            drawn = self._random.sample(others, self._random.randint(1, 3))
        if self._wrappers in OF_GROUPS:
            # Which of two wrappers has ended when a callback of the user's runs, nobody promises.
            drawn = [each for each in drawn if not each.startswith("looks")]
        return tuple(("", hook, self._chance(0.5)) for hook in drawn)

    # What is done with it.

    def _draw_quiet_steps(self) -> list[Action]:
        """For a wrapper that would go by what has been usual."""
        if "buffers" in self._roots and self._chance(0.6):
            return [training.QuietSteps(self._one_of([17, 20, 25]))]
        return [training.QuietSteps(self._one_of([2, 5, 12]))] if self._chance(0.3) else []

    def _draw_step(self, number: int) -> Iterator[Action]:
        """One iteration of a training loop."""
        if self._wrappers in OF_GROUPS:
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
        """With one wrapper, or without ``title`` with both of its groups."""
        yield from self._interludes("before", number)
        yield ZeroGrad(True if not title else self._chance(0.75), by_optimizer=True)
        yield from self._interludes("zeroed", number)
        if title:
            yield from self._draw_backward(title, number)
        else:
            # In the second forward stock's wrappers agree on their buckets.
            orders = [(0, 1) if number == 1 or self._chance(0.5) else (1, 0) for _ in self._ranks]
            yield training.ForwardsInAnyOrder(tuple(orders))
            yield from self._interludes("between", number)
            yield Backward((0, 1))
        yield from self._interludes("after", number)
        yield Step()
        if title and self._chance(0.15):
            yield from self._evaluate(title)

    def _draw_backward(self, title: str, number: int) -> Iterator[Action]:
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
        yield from self._interludes("between", number)
        # A collective of one's own has no second derivative.
        penalty = not (self._collects or self._network.has_norm) and self._chance(0.08)
        yield Backward(penalty=penalty and not self._network.hides)

    def _forward(self, title: str, **more: bool) -> Forward:
        return Forward(0, (6,) * self._world_size, wrapper=title, **more)

    def _evaluate(self, title: str) -> list[Action]:
        forward = self._forward(title, grad=False, training=False)
        return [forward] * self._random.randint(1, 3)

    def _interludes(self, moment: str, number: int) -> Iterator[Action]:
        """What the roots add.

        ``"before"`` a step, where gradients are ``"zeroed"``, ``"between"`` a forward and its
        backward, or ``"after"`` that.
        """
        draw = {
            "backwards": self._draw_backwards,
            "buffers": self._draw_buffers,
            "gradients": self._draw_gradients,
            "wrappers": self._draw_wrappers,
            "names": self._draw_names,
        }
        for root in self._roots:
            if root in draw and self._chance(0.5):
                yield from draw[root](moment, number)

    # The roots.

    def _draw_backwards(self, moment: str, number: int) -> list[Action]:
        if moment == "between":
            ranks = self._some_ranks()
            if self._network.has_norm or self._chance(0.7):
                return [probes.InputGradient(0, ranks, self._chance(0.5))]
            return [probes.ParameterGradient(ranks)]
        if self._chance(0.15):
            return [probes.ParameterGradient(self._some_ranks())]
        ends = list(probes.ENDS)
        if moment == "before":
            ends.remove("left")  # it would be dropped anyway
        elif moment == "after":
            ends = ["left", "put aside"]
        counts = self._one_of(
            [
                tuple(int(rank == 0) for rank in self._ranks),
                tuple(self._random.randint(0, 3) for _ in self._ranks),
                (self._random.randint(1, 2),) * self._world_size,
                tuple(2 * int(rank == self._world_size - 1) for rank in self._ranks),
            ]
        )
        way = self._one_of(probes.WAYS)
        return [probes.Probe(counts, way, self._one_of(ends), self._chance(0.3))]

    def _draw_saliency(self, title: str, least: int = 0) -> list[Action]:
        # Forwards that broadcast buffers are as many on all ranks. No other collective may be in
        # front of the one in which stock agrees on its buckets.
        if self._wrappers not in ("one network", "shared encoder"):
            return []
        least = 2 if self._network.has_buffers else least
        counts = tuple(self._random.randint(least, 2) for _ in self._ranks)
        return [probes.Saliency(counts, self._one_of(["", "", "blocks.b0"]), title)]

    def _in_a_mode(self, action: Action) -> Action:
        """The action, or the same in a mode."""
        if isinstance(action, Forward) and not action.grad:
            mode = self._maybe(0.8, self._one_of(list(OF_EVALUATIONS)))
            return action if mode is None else Under(mode, action)
        if isinstance(action, _USUAL) and self._chance(0.3):
            return Under(self._one_of(list(MODES)), action)
        return action

    def _draw_buffers(self, moment: str, number: int) -> list[Action]:
        spec = self._network
        if not spec.has_buffers:
            return []
        if moment == "between":
            # What BatchNorm's backward needs is not written to.
            count = len(spec.buffers)
            return [self._draw_write(UNSEEN if spec.has_norm else WAYS, count)] if count else []
        match self._random.randrange(8):
            case 0:
                return [buffers.Recalibrate(self._some_ranks(), self._random.randint(1, 3))]
            case 1:
                return self._evaluate("main")
            case 2:
                return [self._draw_write(), *self._evaluate("main")]
            case 3:
                self._is_averaged = True
                return [buffers.KeepState()]
            case 4 if self._is_averaged:
                by = self._one_of(["load_state_dict", "data"])
                ranks = self._some_ranks()
                swap, back = (buffers.SwapIn(ranks, by, back) for back in (False, True))
                return [swap, *self._evaluate("main"), back]
            case _:
                return [self._draw_write()]

    def _draw_write(self, ways: tuple[str, ...] = WAYS, count: int = 20) -> Action:
        which = tuple(self._random.randrange(count) for _ in range(self._random.randint(1, 2)))
        return buffers.Write(self._some_ranks(), self._one_of(ways), which, self._chance(0.2))

    def _draw_gradients(self, moment: str, number: int) -> list[Action]:
        if moment == "before" and self._is_kept:
            changes: list[list[Action]] = [[gradients.ChangeKept()], [gradients.FreeKept()], []]
            return changes[self._random.randrange(3)]
        if moment != "after":
            return []
        looks = [gradients.CopyGradients(), gradients.ReadAsWords(), gradients.Multiply()]
        actions: list[Action] = [gradients.LookAtMemory()]
        actions += self._random.sample(looks, self._random.randint(0, 2))
        if self._chance(0.3):
            self._is_kept = True
            actions.append(gradients.KeepGradients())
        elif self._chance(0.4):
            ways = ["replaced", "given other data", "scaled in place", "freed"]
            ranks = self._some_ranks() if self._chance(0.3) else tuple(self._ranks)
            actions.append(gradients.ChangeGradients(self._one_of(ways), ranks))
        return actions

    def _draw_wrappers(self, moment: str, number: int) -> list[Action]:
        if moment != "before" or self._wrappers not in ("one network", "local and global"):
            return []
        match self._random.randrange(4):
            case 0:
                return [wrapping.LetGo()]
            case 1 if not self._forwards_names:
                return [wrapping.CopyWrapper(self._chance(0.5))]
            case _:
                # Views of an old wrapper that is still held are nobody's but its own.
                held = () if self._views else self._some_ranks(may_be_none=True)
                return [wrapping.WrapAgain(held, in_a_cycle=self._chance(0.4))]

    def _draw_names(self, moment: str, number: int) -> list[Action]:
        read = names.ReadNames("main")
        if moment == "after" or (moment == "before" and number == 0) or self._chance(0.2):
            if self._chance(0.2):
                name, value = self._one_of(names.METHODS), self._one_of(list(names.PLAIN_VALUES))
            else:
                name, value = self._one_of(names.NAMES), self._one_of(list(names.VALUES))
            if value == "a parameter" and self._forwards_names:
                value = "a module"  # torch refuses a parameter whose name something answers to
            self._names_set.append(name)
            return [names.SetName(name, value), read]
        if self._names_set and self._chance(0.3):
            return [names.DeleteName(self._one_of(self._names_set)), read]
        return [read]
