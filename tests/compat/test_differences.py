"""What stock DDP makes of the same cases: ``tests/cases/README.md`` says it, and this proves it.

Each case of the table runs with stock DDP on two ranks, once without and once with
``find_unused_parameters=True``, and is held against the same oracle as ours.
"""

import contextlib
import inspect
import re
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import CASES, Case
from cases.stock import ERRORS, HANGS, RIGHT, TWICE, TWICE_HANGS, WRONG
from distributed import gather, ranks
from oracle import adopt, mean_over_ranks, one_per_rank, seed
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import tritonddp


class Stock(DistributedDataParallel):
    """Cases that need what it lacks show what becomes of them without."""

    def weighted(self, n: float, reduction: str = "mean") -> Any:
        return contextlib.nullcontext()

    def reduce_gradients(self, gradients: Any = None, params: Any = None) -> Any:
        if isinstance(gradients, Mapping):
            return {name: gradients.get(name) for name, _ in self.module.named_parameters()}
        return gradients


def outcome(name: str, find_unused_parameters: bool) -> list[str]:
    """What three steps of stock DDP came to on each rank, and its message where that is an error.

    Runs on every rank.
    """
    timeout = 5 if "hangs" in CASES[name].stock[find_unused_parameters] else 60
    options = {"find_unused_parameters": True} if find_unused_parameters else {}
    rank, case = dist.get_rank(), CASES[name]
    group = dist.new_group(timeout=timedelta(seconds=timeout))
    torch.manual_seed(0)  # all ranks make the same model
    modules = [module.double() for module in case.models()]
    alone = [one_per_rank(module) for module in modules]
    nets = [Stock(module, process_group=group, **{**case.options, **options}) for module in modules]
    result = RIGHT
    try:
        for step in range(3):
            for number in range(dist.get_world_size()):
                run(case, [models[number] for models in alone], number, step)
            run(case, nets, rank, step)
            for net, models in zip(nets, alone, strict=True):
                means = mean_over_ranks(models)
                for param, mean in zip(net.parameters(), means, strict=True):
                    same = param.grad is None if mean is None else param.grad is not None
                    if not same or (mean is not None and not torch.allclose(param.grad, mean)):
                        result = WRONG
                net.zero_grad()
                adopt(models, [None] * len(means))
    except RuntimeError as error:
        result = str(error)[:200]
    return gather(result)


def run(case: Case, nets: Sequence[Any], rank: int, step: int) -> None:
    seed(rank, step)
    case.step(nets[0] if len(nets) == 1 else nets, rank, step)


def named(results: Sequence[str]) -> str:
    """One outcome for all ranks: an error of one outweighs what it makes of the others."""
    found = [
        name for name, text in ERRORS.items() if any(re.search(text, result) for result in results)
    ]
    if set(found) == {TWICE, HANGS}:
        return TWICE_HANGS
    return found[0] if found else next((r for r in results if r != RIGHT), RIGHT)


# The page is of torch 2.13.
HAS_FORWARD_SYNC_BUFFERS = (
    "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
)


@pytest.mark.parametrize("name", CASES)
@ranks(2)
def test_stock_does_what_the_page_says(name: str) -> None:
    if name.startswith(("batch_norm", "buffer")) and not HAS_FORWARD_SYNC_BUFFERS:
        return  # torch 2.11 writes into buffers that a backward needs: another outcome
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the flag is not needed, or that a graph is kept
        results = [outcome(name, flag) for flag in (False, True)]
    assert tuple(map(named, results)) == CASES[name].stock, results


def test_every_case_is_compared_with_stock() -> None:
    known = {*ERRORS, RIGHT, WRONG, TWICE_HANGS}
    assert all({*case.stock} <= known for case in CASES.values())


# Token-weighted losses


VOCABULARY, PADDING, LENGTH = 11, 0, 9


def language_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(VOCABULARY, 6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, VOCABULARY)
    ).double()


def shard(rank: int) -> Tensor:
    """Tokens of this rank, ``[sequences, LENGTH]``: each has its own number and lengths."""
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(1, VOCABULARY, (1 + 2 * rank, LENGTH), generator=generator)
    for row, sequence in enumerate(tokens):
        sequence[2 + 3 * rank + row :] = PADDING
    return tokens


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean over all tokens that are no padding."""
    logits, targets = model(tokens[:, :-1]), tokens[:, 1:]
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PADDING)


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("accumulate", [False, True], ids=["one batch", "microbatches"])
@ranks(2, 3)
def test_a_token_weighted_loss_has_the_gradient_of_one_process_and_stocks_has_not(
    accumulate: bool, view: bool
) -> None:
    """One process computes the loss of all ranks' tokens together."""
    one_process, mine = language_model(), shard(dist.get_rank())
    next_token_loss(one_process, torch.cat([*map(shard, range(dist.get_world_size()))])).backward()
    expected = [param.grad for param in one_process.parameters()]

    ours = tritonddp.DistributedDataParallel(language_model(), gradient_as_bucket_view=view)
    microbatches = mine.split(2) if accumulate else [mine]
    for number, tokens in enumerate(microbatches):
        with contextlib.ExitStack() as stack:
            if number < len(microbatches) - 1:
                stack.enter_context(ours.no_sync())
            stack.enter_context(ours.weighted((tokens[:, 1:] != PADDING).sum()))
            next_token_loss(ours, tokens).backward()
    for param, gradient in zip(ours.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad, gradient, rtol=1e-12, atol=1e-14)

    stock = DistributedDataParallel(language_model(), gradient_as_bucket_view=view)
    next_token_loss(stock, mine).backward()
    for param, gradient in zip(stock.parameters(), expected, strict=True):
        assert (param.grad - gradient).norm() > 0.1 * gradient.norm()
