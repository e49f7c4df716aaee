"""What a rank process does: it plays programs with both classes, and compares what it saw."""

import gc
import hashlib
import logging
import os
import pickle
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from distributed import give_up_after
from logged import Kept, logged
from torch.nn.parallel import DistributedDataParallel as Stock

from differential import in_ranks as usual
from differential.hostile.backwards import Probe
from differential.hostile.faults import FAULTS
from differential.hostile.generator import program_of
from differential.hostile.gradients import STEPS
from differential.hostile.player import Player, Seen
from differential.hostile.program import Program
from differential.trace import Snapshot
from tritonddp import DistributedDataParallel, replicate

OURS, STOCK, IN_PLACE = "tritonddp", "stock", "in-place"
# What stock is compared with. With itself only the generator can be wrong, with a fault it has to
# show.
WRAPPERS: dict[str, Any] = {
    OURS: DistributedDataParallel,
    STOCK: Stock,
    IN_PLACE: replicate,
    **FAULTS,
}
# How far sums in another order may be apart, in fp64, after some steps.
_NEAR = 1e-9


def is_of(wrapper: str, program: Program) -> bool:
    """Whether stock's contract is that of ``wrapper`` too.

    In place there is no other wrapper, none that has names, no backward past it, and buffers travel
    at another time. A part of two modules is reduced with both, whichever is under ``no_sync``.
    """
    if wrapper != IN_PLACE:
        return True
    keeps_buffers = dict(program.options).get("broadcast_buffers") is False
    has_others = {*program.roots} & {"backwards", "wrappers", "names"}
    is_shared = program.kind == "shared encoder"
    return not is_shared and not has_others and (keeps_buffers or not program.network.has_buffers)


@dataclass(frozen=True)
class Played:
    """What has come of a program on one rank.

    Attributes:
        difference: the first one, in words, or ``""``.
        digests: for each thing seen, what it is called, and digests of it with stock and with ours.
            Where stock's are the same on all ranks, ours have to be.
    """

    difference: str
    digests: list[tuple[str, bytes, bytes]]


def play_all(seeds: Sequence[int], folder: str, timeout: float, wrapper: str = OURS) -> None:
    """Play programs; what has come of each goes into a file of the folder, ``SEED.RANK``.

    What is found before a process dies, or waits for ever, is not lost so.

    Args:
        seeds: of the programs.
        folder: that is there.
        timeout: of process groups, in seconds: a program that differs may end in a wait.
        wrapper: which class stock is compared with, of :data:`WRAPPERS`.

    Raises:
        RuntimeError: something was raised; the message says in which program, and where.
    """
    dist.barrier()  # one rank may have taken seconds to import all this
    give_up_after(timeout, dist.group.WORLD)
    rank = dist.get_rank()
    groups: dict[Any, Any] = {}
    gc.collect()
    gc.freeze()  # or each collection would look at all of torch
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in seeds:
            program = program_of(seed, dist.get_world_size())
            # In the log of this process, which is shown where it hangs.
            print(f"seed {seed}", flush=True)
            stock = _play(program, STOCK, Stock, groups, timeout)
            through_the_group = {} if seed % 3 else {"TRITONDDP_PEER_MEMORY": "0"}
            with (
                usual.configured(seed),
                patch.dict(os.environ, through_the_group),
                logged(logging.WARNING) as log,
            ):
                ours = _play(program, wrapper, WRAPPERS[wrapper], groups, timeout)
            played = _compared(program, stock, ours)
            alarm = _false_alarm(program, log, wrapper in (OURS, IN_PLACE))
            if alarm and not played.difference:
                played = Played(f"rank {rank}: {alarm}", [])
            path = os.path.join(folder, f"{seed}.{rank}")
            with open(f"{path}.new", "wb") as file:
                pickle.dump(played, file)
            os.replace(f"{path}.new", path)


def _false_alarm(program: Program, log: Kept, is_ours: bool) -> str:
    """What the log says without reason, or leaves out."""
    steps = STEPS in dict(program.hooks)
    said = log.lines("hooked_steps")
    # (With a group of one rank there is nothing to say.)
    if bool(said) != steps and (said or is_ours) and program.kind != "local and global":
        return f"an optimizer in a hook, {steps}: the log says {said}"
    wraps = 1 + sum("WrapAgain" in str(each) for each in program.actions)
    if len(said) > wraps and program.kind == "one network":
        return f"more than once for a wrapper: {said}"
    added = log.lines("in_step")
    leaves = any(isinstance(each, Probe) and each.end == "left" for each in program.actions)
    return f"without reason: {added}" if added and not leaves else ""


def _play(
    program: Program, title: str, cls: Any, groups: dict[Any, Any], timeout: float
) -> list[Seen]:
    player = Player(program, dist.get_rank(), cls, timeout)
    player.groups = groups
    try:
        player.play()
    except Exception as error:
        at = f"action {player.number}: {[*program.actions, 'the end'][player.number]}"
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(last.filename)}:{last.lineno}"
        message = f"seed {program.seed}: {title} raised {type(error).__name__} ({error}) in {at}"
        raise RuntimeError(f"{message}, {where}") from error
    seen = player.seen
    del player
    gc.collect()  # what is left of one program may not help the next one
    return seen


def _compared(program: Program, stock: list[Seen], ours: list[Seen]) -> Played:
    is_exact = program.world_size == 2  # sums of two numbers are, in any order
    difference = next(
        (
            f"rank {dist.get_rank()}, {_where(program, mine)}: {mine.what} is "
            f"{_shown(mine.value)}, with {STOCK} it is {_shown(its.value)}"
            for its, mine in zip(stock, ours, strict=False)
            if (its.action, its.what) != (mine.action, mine.what)
            or not _is_as(mine.value, its.value, is_exact)
        ),
        "",
    )
    if not difference and len(stock) != len(ours):
        difference = f"rank {dist.get_rank()} saw {len(ours)} things, with {STOCK} {len(stock)}"
    digests = []
    if not is_exact:
        digests = [
            (f"{_where(program, mine)}: {mine.what}", _digest(its.value), _digest(mine.value))
            for its, mine in zip(stock, ours, strict=False)
        ]
    return Played(difference, digests)


def _is_as(mine: Snapshot | str, its: Snapshot | str, is_exact: bool) -> bool:
    if mine == its or is_exact or isinstance(mine, str) or isinstance(its, str):
        return mine == its
    if (mine.dtype, mine.shape) != (its.dtype, its.shape):
        return False
    if mine.dtype is torch.int64 and len(mine.content) % 8 == 0:
        return _is_near(mine, its, torch.float64)  # words of gradients
    if mine.dtype is torch.uint8 and len(mine.content) % 8 == 0:
        return _is_near(mine, its, torch.float64)
    return _is_near(mine, its, mine.dtype)


def _is_near(mine: Snapshot, its: Snapshot, dtype: torch.dtype) -> bool:
    if not mine.content or not dtype.is_floating_point:
        return mine == its
    a, b = (torch.frombuffer(bytearray(each.content), dtype=dtype).double() for each in (mine, its))
    relative = _NEAR if dtype is torch.float64 else 0.01 if dtype is torch.bfloat16 else 1e-5
    return torch.allclose(a, b, rtol=relative, atol=relative, equal_nan=True)


def _digest(value: Snapshot | str) -> bytes:
    content = value.encode() if isinstance(value, str) else value.content
    return hashlib.blake2b(content, digest_size=8).digest()


def _where(program: Program, seen: Seen) -> str:
    action = [*program.actions, "the end"][seen.action]
    return f"after action {seen.action} ({action})"


def _shown(value: Snapshot | str) -> str:
    if isinstance(value, str):
        return value
    flat = value.tensor().flatten()
    more = ", ..." if flat.numel() > 4 else ""
    elements = ", ".join(
        f"{each:.9g}" if isinstance(each, float) else str(each) for each in flat[:4].tolist()
    )
    return f"{value.dtype} {value.shape} [{elements}{more}]"
