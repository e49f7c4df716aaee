"""Programs of forwards and backwards only: one row each."""

from collections.abc import Callable
from typing import Any

from oracle import Net

from differential.named.models import Checkpointed, batch
from differential.named.table import ASSERTION, HANGS, RIGHT, TWICE, UNDEFINED, UNUSED, program

Names = str | Callable[[int, int], str]


def plain(name: str, without_flag: str, with_flag: str, *names: Names, **options: Any) -> None:
    """A backward through each of these branches, all but the last under ``no_sync``.

    Args:
        name: of the program; its outcomes under stock DDP follow, as for :func:`program`.
        names: branches, or a function of rank and step that returns them.
        options: of :func:`program`.
    """

    def step(net: Net, rank: int, step: int) -> None:
        *earlier, last = (each(rank, step) if callable(each) else each for each in names)
        if earlier:
            with net.no_sync():
                for each in earlier:
                    net(batch(), each).sum().backward()
        net(batch(), last).sum().backward()

    step.__name__ = name
    program(without_flag, with_flag, **options)(step)


def by_rank(first: str, others: str) -> Names:
    return lambda rank, step: others if rank else first


def differing(rank: int, step: int) -> str:
    return ["ba", "ef", "f", "bce", "ab", "cd", "ef", "ad"][(step + 3 * rank) % 8]


def aab(rank: int, step: int) -> str:
    return (["aab", "aba"] if rank else ["bb", "a"])[step % 2] if step else "aabb"


REENTRANT = {"model": Checkpointed}
STATIC = {"static_graph": True}

plain("unused_everywhere", UNUSED, RIGHT, "abd")
plain("unused_on_one_rank", UNUSED, RIGHT, by_rank("acdef", "abc"))
plain("different_on_each_rank_and_step", UNUSED, RIGHT, differing)
flag = {"find_unused_parameters": True}
plain("unused_with_the_flag_of_stock", RIGHT, RIGHT, by_rank("acd", "abc"), **flag)
plain("unused_with_static_graph", RIGHT, RIGHT, by_rank("acd", "abc"), **STATIC)
silent = lambda rank, step: "" if rank == step % 2 else "abc"  # noqa: E731
plain("loss_reaches_nothing_on_one_rank", UNUSED, HANGS, silent)
plain("loss_reaches_nothing_on_any_rank", RIGHT, RIGHT, "")

plain("no_sync_around_all_of_the_earlier_ones", UNUSED, RIGHT, "abc", "abc", "abc")
plain("no_sync_with_static_graph", ASSERTION, ASSERTION, "abc", "abc", **STATIC)
earlier = by_rank("d", "abc")
last = by_rank("ea", "e")
plain("used_in_an_earlier_microbatch_of_one_rank", UNUSED, RIGHT, earlier, last)
plain("nothing_in_the_last_microbatch", UNUSED, UNDEFINED, by_rank("ad", "abc"), "")

plain("reentrant_checkpoint_of_one_layer_twice", TWICE, TWICE, "aabcba", **REENTRANT)
plain("reentrant_checkpoints_that_differ_by_step_and_rank", TWICE, TWICE, aab, **REENTRANT)
plain("reentrant_checkpoints_under_no_sync", UNUSED, TWICE, "aab", "ba", **REENTRANT)
plain("reentrant_checkpoint_with_static_graph", RIGHT, RIGHT, "aabcba", **REENTRANT, **STATIC)
