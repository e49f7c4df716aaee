"""The outcomes of the named programs under stock DDP are those of ``named/README.md``.

Each program runs with stock DDP on two ranks, without and with ``find_unused_parameters=True``, and
is compared with the oracle.
"""

import contextlib
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from distributed import run_ranks
from torch.nn.parallel import DistributedDataParallel

from differential.comparison import Judge
from differential.in_ranks import STOCK, STOCK_DEFINES, play
from differential.kinds import program_of
from differential.named import PROGRAMS
from differential.named.table import ERRORS, HANGS, RIGHT, TWICE, TWICE_HANGS, WRONG
from differential.trace import Trace


class Stock(DistributedDataParallel):
    """Stock DDP with the methods of tritonddp, which do nothing."""

    def weighted(self, n: float, reduction: str = "mean") -> Any:
        return contextlib.nullcontext()

    def reduce_gradients(self, gradients: Any = None, params: Any = None) -> Any:
        if isinstance(gradients, Mapping):
            return {name: gradients.get(name) for name, _ in self.module.named_parameters()}
        return gradients


def played_by_stock(name: str, finds_unused: bool) -> Trace | str:
    """What this rank saw, or its error."""
    program = program_of("named", [*PROGRAMS].index(name), 2)
    options = program.options
    if finds_unused:
        options = replace(options, find_unused_parameters=True)
    seconds = 5 if "hangs" in PROGRAMS[name].stock[finds_unused] else 60
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return play(program, STOCK, partial(Stock, process_group=group), options)
        except RuntimeError as error:
            return str(error)


def outcome(name: str, results: Sequence[Trace | str]) -> str:
    """The outcome of all ranks: the error of one causes what the others saw."""
    errors = [each for each in results if isinstance(each, str)]
    if not errors:
        program = program_of("named", [*PROGRAMS].index(name), 2)
        judged = Judge(program, STOCK).differences(results, len(program.actions))
        return WRONG if any(True for _ in judged) else RIGHT
    found = [key for key, text in ERRORS.items() if any(re.search(text, each) for each in errors)]
    if {*found} == {TWICE, HANGS}:
        return TWICE_HANGS
    return found[0] if found else errors[0]


@pytest.mark.parametrize("name", PROGRAMS)
def test_stock_does_what_the_page_says(name: str) -> None:
    if name.startswith(("batch_norm", "buffer")) and not STOCK_DEFINES:
        return  # torch 2.11 writes into buffers that a backward needs: another outcome
    outcomes = tuple(
        outcome(name, run_ranks(played_by_stock, 2, name, flag)) for flag in (False, True)
    )
    assert outcomes == PROGRAMS[name].stock
