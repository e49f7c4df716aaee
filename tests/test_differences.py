"""What stock DDP makes of the same cases: ``docs/differences.md`` says it, and this proves it.

Each case of the table runs with stock DDP on two ranks, once without and once with
``find_unused_parameters=True``, and is held against the same oracle as ours.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import CASES, Case
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


# What can become of a case, as the page calls it, and what stock's error says.
RIGHT = "right"
WRONG = "wrong, silently"
HANGS = "hangs"
UNUSED = "error: finished reduction"
TWICE = "error: ready only once"
UNDEFINED = "error: undefined gradient"
ASSERTION = "internal assertion"
IN_PLACE = "error: in-place operation"
TWICE_HANGS = f"{TWICE}; another rank hangs"
ERRORS = {
    UNUSED: "Expected to have finished reduction in the prior iteration",
    TWICE: "Expected to mark a variable ready only once",
    UNDEFINED: "Encountered gradient which is undefined, but still allreduced by DDP reducer",
    ASSERTION: "INTERNAL ASSERT FAILED",
    IN_PLACE: "a leaf Variable that requires grad is being used in an in-place operation",
    HANGS: "gloo/transport|timeout",  # of the rank that waits until its time is up
}
# Stock's outcome without, and with `find_unused_parameters=True`.
STOCK: dict[str, tuple[str, str]] = {
    "unused_everywhere": (UNUSED, RIGHT),
    "unused_on_one_rank": (UNUSED, RIGHT),
    "nothing_in_common": (UNUSED, RIGHT),
    "different_on_each_rank_and_step": (UNUSED, RIGHT),
    "mixture_of_experts": (UNUSED, RIGHT),
    "skipped_layers": (UNUSED, RIGHT),
    "whole_submodule_unused_on_some_ranks": (UNUSED, RIGHT),
    "whole_submodule_unused_for_some_steps": (UNUSED, RIGHT),
    "unused_with_the_flag_of_stock": (RIGHT, RIGHT),
    "unused_with_static_graph": (RIGHT, RIGHT),
    "same_parameter_many_times": (UNUSED, RIGHT),
    "custom_function_gives_none_on_one_rank": (UNUSED, TWICE),
    "custom_function_gives_none_on_all_ranks": (UNUSED, TWICE),
    "backward_with_respect_to_some": (UNUSED, UNUSED),
    "outputs_ignored_by_the_loss": (UNUSED, RIGHT),
    "different_outputs_ignored_on_each_rank": (UNUSED, RIGHT),
    "only_the_second_field_of_a_dataclass": (UNUSED, UNUSED),
    "used_outside_forward_too": (UNUSED, TWICE),
    "used_outside_forward_on_one_rank": (UNUSED, TWICE_HANGS),
    "used_outside_forward_only": (UNUSED, TWICE),
    "loss_without_any_forward": (WRONG, WRONG),
    "penalty_on_all_weights": (RIGHT, TWICE),
    "forward_of_the_output": (UNUSED, RIGHT),
    "same_graph_twice": (TWICE, WRONG),
    "two_losses_of_one_graph": (TWICE, UNDEFINED),
    "two_losses_that_share_a_trunk": (TWICE, UNDEFINED),
    "two_forwards_then_two_backwards": (TWICE, TWICE),
    "two_forwards_then_two_backwards_in_reverse": (TWICE, UNDEFINED),
    "two_forwards_then_one_backward": (UNUSED, TWICE),
    "a_loss_per_microbatch": (UNUSED, RIGHT),
    "gan_alternation": (UNUSED, RIGHT),
    "gan_with_the_judge_frozen_for_the_generator": (UNUSED, RIGHT),
    "forward_without_backward": (UNUSED, RIGHT),
    "no_sync_around_all_of_the_earlier_ones": (UNUSED, RIGHT),
    "no_sync_around_the_forward": (UNUSED, RIGHT),
    "no_sync_around_the_backward": (UNUSED, RIGHT),
    "no_sync_with_static_graph": (ASSERTION, ASSERTION),
    "no_sync_around_the_forward_with_static_graph": (ASSERTION, ASSERTION),
    "no_sync_around_the_backward_with_static_graph": (RIGHT, RIGHT),
    "used_in_an_earlier_microbatch_only": (UNUSED, RIGHT),
    "used_in_an_earlier_microbatch_of_one_rank": (UNUSED, RIGHT),
    "used_in_an_earlier_microbatch_with_static_graph": (ASSERTION, ASSERTION),
    "nothing_in_the_last_microbatch": (UNUSED, UNDEFINED),
    "no_sync_in_the_middle_of_a_graph": (TWICE, WRONG),
    "more_microbatches_on_one_rank": (UNUSED, RIGHT),
    "exception_inside_no_sync": (UNUSED, RIGHT),
    "flag_set_by_hand": (UNUSED, RIGHT),
    "flag_set_by_hand_between_forward_and_backward": (UNUSED, RIGHT),
    "no_sync_around_the_later_of_two_forwards": (UNUSED, TWICE),
    "prepared_behind_a_forward_under_no_sync": (RIGHT, TWICE),
    "accelerate_accumulates": (UNUSED, RIGHT),
    "lightning_runs_the_backward_inside_forward": (UNUSED, UNDEFINED),
    "lightning_blocks_the_synchronisation": (UNUSED, UNDEFINED),
    "lightning_prepares_the_reducer": (RIGHT, RIGHT),
    "accelerate_triggers_the_synchronisation": (RIGHT, TWICE),
    "reducer_prepared_between_two_losses": (RIGHT, TWICE),
    "reentrant_checkpoint_of_one_layer_twice": (TWICE, TWICE),
    "reentrant_checkpoints_that_differ_by_step_and_rank": (TWICE, TWICE),
    "reentrant_checkpoints_under_no_sync": (UNUSED, TWICE),
    "reentrant_checkpoint_with_static_graph": (RIGHT, RIGHT),
    "two_losses_behind_reentrant_checkpoints": (TWICE, TWICE),
    "checkpoint_of_one_layer_twice": (UNUSED, RIGHT),
    "checkpoints_that_differ_by_step_and_rank": (UNUSED, RIGHT),
    "not_reentrant_first_and_reentrant_later": (UNUSED, TWICE),
    "not_checkpointed_first_and_reentrant_later": (UNUSED, TWICE),
    "frozen_in_turns": (UNUSED, RIGHT),
    "frozen_in_turns_and_unused_on_one_rank": (UNUSED, RIGHT),
    "frozen_when_wrapped_and_unfrozen_later": (WRONG, WRONG),
    "unfrozen_and_used_on_one_rank": (UNUSED, WRONG),
    "gan_with_the_judge_frozen_by_requires_grad": (RIGHT, RIGHT),
    "frozen_between_forward_and_backward": (WRONG, RIGHT),
    "frozen_inside_a_window": (UNUSED, RIGHT),
    "unfrozen_inside_a_window": (WRONG, WRONG),
    "unfrozen_and_frozen_again_inside_a_window": (WRONG, WRONG),
    "parameter_replaced": (UNUSED, WRONG),
    "layer_replaced_before_each_step": (UNUSED, WRONG),
    "layers_added": (WRONG, WRONG),
    "layer_added_that_one_rank_uses": (WRONG, WRONG),
    "adapters_added_and_the_rest_frozen": (WRONG, WRONG),
    "weighted_by_samples": (WRONG, WRONG),
    "weighted_sum_of_samples": (WRONG, WRONG),
    "weighted_and_unused_parameters": (UNUSED, WRONG),
    "weighted_by_fractions": (WRONG, WRONG),
    "weight_of_zero_with_a_loss_of_nan": (WRONG, WRONG),
    "weight_of_zero_with_a_sum_over_nothing": (WRONG, WRONG),
    "all_weights_zero_in_the_first_step": (WRONG, WRONG),
    "weighted_windows_of_different_length": (UNUSED, WRONG),
    "weighted_windows_of_sums_of_different_length": (UNUSED, WRONG),
    "weighted_after_a_microbatch_without_weight": (WRONG, WRONG),
    "weighted_twice": (WRONG, WRONG),
    "weighted_sums_twice": (WRONG, WRONG),
    "batch_norm_two_forwards_then_one_backward": (RIGHT, RIGHT),
    "batch_norm_two_forwards_then_two_backwards": (WRONG, WRONG),
    "batch_norm_in_eval_two_forwards_then_one_backward": (RIGHT, RIGHT),
    "batch_norm_in_eval_two_forwards_then_two_backwards": (WRONG, WRONG),
    "buffer_as_a_factor_two_forwards_then_one_backward": (RIGHT, RIGHT),
    "gradient_of_the_input": (UNUSED, RIGHT),
    "gradient_of_parameters": (UNUSED, RIGHT),
    "gradient_of_another_output": (UNUSED, TWICE),
    "gradient_between_no_sync_and_backward": (UNUSED, RIGHT),
    "gradient_penalty": (UNUSED, RIGHT),
    "gradient_penalty_alone": (UNUSED, UNUSED),
    "backward_that_builds_a_graph": (IN_PLACE, IN_PLACE),
    "autograd_grad_alone": (RIGHT, RIGHT),
    "gradients_of_autograd_grad": (WRONG, WRONG),
    "gradients_of_second_order": (WRONG, WRONG),
    "gradients_by_name": (WRONG, WRONG),
    "gradients_made_by_hand": (WRONG, WRONG),
    "backwards_under_no_sync_reduced_by_hand": (WRONG, WRONG),
    "gradients_on_request_between_forward_and_backward": (WRONG, WRONG),
    "gradients_on_request_inside_a_window": (WRONG, WRONG),
    "weighted_gradients_on_request": (WRONG, WRONG),
    "loss_reaches_nothing_on_one_rank": (UNUSED, HANGS),
    "loss_reaches_nothing_on_any_rank": (RIGHT, RIGHT),
    "different_control_flow": (UNUSED, UNDEFINED),
}


def outcome(name: str, find_unused_parameters: bool) -> list[str]:
    """What three steps of stock DDP came to on each rank, and its message where that is an error.

    Runs on every rank.
    """
    timeout = 3 if "hangs" in STOCK[name][find_unused_parameters] else 30
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


@pytest.mark.parametrize("name", list(STOCK))
@ranks(2)
def test_stock_does_what_the_page_says(name: str) -> None:
    if name.startswith(("batch_norm", "buffer")) and not HAS_FORWARD_SYNC_BUFFERS:
        return  # torch 2.11 writes into buffers that a backward needs: another outcome
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the flag is not needed, or that a graph is kept
        results = [outcome(name, flag) for flag in (False, True)]
    assert tuple(map(named, results)) == STOCK[name], results


# Ranks that disagree: what rank 1 does while rank 0 makes one step of each module.


def one_more_backward(nets: list[Stock]) -> None:
    loss = nets[0](torch.ones(1, 4)).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def one_backward_fewer(nets: list[Stock]) -> None:
    pass


def frozen_on_one_rank(nets: list[Stock]) -> None:
    nets[0].module.bias.requires_grad_(False)
    step_of_each(nets)


def another_order(nets: list[Stock]) -> None:
    step_of_each(nets[::-1])


def step_of_each(nets: list[Stock]) -> None:
    for net in nets:
        net(torch.full((1, 4), 1.0 + dist.get_rank())).mul(nets.index(net) + 1).sum().backward()


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (one_more_backward, HANGS),
        (one_backward_fewer, HANGS),
        (frozen_on_one_rank, HANGS),
        (another_order, WRONG),
    ],
)
@ranks(2)
def test_stock_when_ranks_disagree(program: Callable[[list[Stock]], None], expected: str) -> None:
    group = dist.new_group(timeout=timedelta(seconds=3))
    torch.manual_seed(0)
    nets = [Stock(nn.Linear(4, 4), process_group=group) for _ in range(2)]
    result = RIGHT
    try:
        step_of_each(nets)
        for net in nets:
            net.zero_grad()
        (program if dist.get_rank() else step_of_each)(nets)
        for number, net in enumerate(nets):
            grad = net.module.weight.grad
            if grad is None or not torch.allclose(grad, torch.tensor(1.5 * (number + 1))):
                result = WRONG
    except RuntimeError as error:
        result = str(error)[:200]
    results = gather(result)
    assert named(results) == expected, results


def test_every_case_is_compared_with_stock() -> None:
    assert set(STOCK) == set(CASES)


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
