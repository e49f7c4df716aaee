"""A program with stock DDP and with tritonddp, and how they differ."""

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from differential.trace import Snapshot
from distributed import give_up_after, run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as Stock

from hostile import collectives, others  # noqa: F401  each puts its programs into the table
from hostile.table import PROGRAMS, Expected
from tritonddp import DistributedDataParallel

_CLASSES = {"stock DDP": Stock, "tritonddp": DistributedDataParallel}
_TIMEOUT = 60.0  # seconds in which a process group gives up
_PAGE = Path(__file__).parents[1] / "cases" / "README.md"


class Record(list[tuple[str, Any]]):
    """All that a rank has noted down, in order.

    Args:
        timeout: see :class:`~hostile.table.Expected`.
    """

    def __init__(self, timeout: float | None) -> None:
        super().__init__()
        self.timeout = timeout

    def waits_in_vain(self) -> None:
        """This rank's next collective is the one that ends in the error that is expected, if any.

        Until then a rank may be late, on a busy machine.
        """
        if self.timeout is not None:
            give_up_after(self.timeout, dist.group.WORLD)

    def __call__(self, key: str, value: Any) -> None:
        """A tensor, bit by bit, or anything that can be compared."""
        self.append((key, Snapshot.of(value) if isinstance(value, Tensor) else value))

    def model(self, key: str, module: nn.Module) -> None:
        """Parameters, gradients and buffers."""
        for name, param in module.named_parameters():
            self(f"{key}: {name}", param)
            self(f"{key}: {name}.grad", param.grad)
        for name, buffer in module.named_buffers():
            self(f"{key}: buffer {name}", buffer)


def differences(name: str) -> Iterator[str]:
    """How a program with tritonddp differs from stock DDP, and from what it says of itself."""
    expected = PROGRAMS[name].expected or Expected("")
    if f"\n| {expected.row}" not in _PAGE.read_text():
        yield f"tests/cases/README.md has no row that begins with '{expected.row}'"
    stock, failure = _play(name, "stock DDP", None)
    if failure:
        yield f"stock DDP fails itself:\n{failure}"
        return
    ours, failure = _play(name, "tritonddp", expected.timeout)
    if expected.error and not re.search(expected.error, failure):
        how = f"has failed otherwise:\n{failure}" if failure else "ran to its end"
        yield f"tritonddp should have failed with '{expected.error}', but {how}"
    elif failure and not expected.error:
        yield f"tritonddp fails, stock DDP does not:\n{failure}"
    differ = [
        f"rank {rank}, {one[0]}: {other[1]}, with stock DDP {one[1]}"
        for rank, rows in enumerate(zip(stock, ours, strict=False))
        for one, other in zip(*rows, strict=True)
        if one != other
    ]
    if not expected.keys:
        yield from differ
        return
    key_of = [each.partition(", ")[2] for each in differ]
    yield from (text for text, key in zip(differ, key_of, strict=True) if not _is(expected, key))
    if not differ:
        yield f"nothing differs: the program need not expect it ('{expected.keys}') any more"


def _is(expected: Expected, key: str) -> bool:
    return bool(re.search(expected.keys, key))


def _play(name: str, title: str, timeout: float | None) -> tuple[list[Record], str]:
    """What each rank noted down, and how it failed, in processes that end with the program then."""
    arguments = name, title, timeout
    try:
        return run_ranks(_on_a_rank, PROGRAMS[name].ranks, *arguments), ""
    except pytest.fail.Exception as failure:
        return [], str(failure)


def _on_a_rank(name: str, title: str, timeout: float | None) -> Record:
    dist.barrier()  # one rank may have taken seconds to import all this
    give_up_after(_TIMEOUT, dist.group.WORLD)
    record = Record(timeout)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*find_unused_parameters=True was specified")
        PROGRAMS[name].run(_CLASSES[title], record)
    return record
