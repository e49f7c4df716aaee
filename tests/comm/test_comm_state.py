"""A new wrapper goes on with the bits of the one before it, once it has its state."""

import io
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import (
    assert_same_bits,
    assert_same_on_all_ranks,
    in_rings,
    ranks,
    recorded_collectives,
)
from torch import Tensor, nn
from training import descend, drawn

from tritonddp import DistributedDataParallel

STEPS, SAVED = 13, 3  # parameters that are frozen leave their buckets after 8 steps


class Net(nn.Module):
    """Gradients come in another order than that in which the layers were made."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(40, 5)
        self.first = nn.Linear(7, 60)
        self.middle = nn.Linear(60, 40)  # large enough to be quantized

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).relu()).relu())


def step(net: Any, seed: int, weighted: bool) -> None:
    """One step of gradient descent; ranks have other inputs, and other numbers of them."""
    rank = dist.get_rank()
    items = 3 + 5 * rank
    inputs = drawn(items, 7, step=seed)
    net.zero_grad()
    with net.weighted(items) if weighted else nullcontext():
        net(inputs).pow(2).mean().backward()
    descend(net, 0.05)


def freeze(net: Any, seed: int) -> None:
    net.module.middle.requires_grad_(seed < SAVED - 1)


def nothing(net: Any, seed: int) -> None: ...


def bits(options: dict[str, Any], before: Callable[[Any, int], None], **how: bool) -> list[Tensor]:
    """Parameters and gradients after each of ``STEPS`` steps.

    Keyword args: ``renews``: another wrapper goes on after ``SAVED``; ``loads``: it has the state;
    ``weighted``: steps are.
    """
    torch.manual_seed(0)
    net = in_rings(Net(), **options)  # whose sums depend on the order of buckets
    result = []
    for seed in range(STEPS):
        if seed == SAVED and how["renews"]:
            memory = io.BytesIO()
            torch.save([net.module.state_dict(), net.comm_state_dict()], memory)
            memory.seek(0)
            saved, state = torch.load(memory, weights_only=True)
            torch.manual_seed(1)
            module = Net()
            module.load_state_dict(saved)
            for ours, theirs in zip(module.parameters(), net.parameters(), strict=True):
                ours.requires_grad_(theirs.requires_grad)
            net = in_rings(module, **options)
            if how["loads"]:
                net.load_comm_state_dict(state)
        before(net, seed)
        step(net, seed, how.get("weighted", False))
        trained = [p for p in net.parameters() if p.requires_grad]
        tensors = [p.detach() for p in net.parameters()] + [p.grad for p in trained]
        result.append(torch.cat([tensor.flatten() for tensor in tensors]))
    return result


CASES = {
    "one bucket": ({}, nothing, False),
    "several": ({"bucket_cap_mb": 0.001}, nothing, False),
    "views": ({"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True}, nothing, False),
    "lazy": ({"lazy_bucket_allocation": True}, nothing, False),
    "frozen before": ({}, freeze, False),
    "weighted fp16": ({"reduce_dtype": torch.float16}, nothing, True),
    "int8": ({"compression": "int8"}, nothing, False),
    "weighted int8": ({"compression": "int8", "bucket_cap_mb": 0.01}, nothing, True),
}


@pytest.mark.parametrize("case", CASES)
@ranks(3)
def test_a_new_wrapper_with_the_state_goes_on_with_the_same_bits(case: str) -> None:
    options, before, weighted = CASES[case]
    expected = bits(options, before, renews=False, weighted=weighted)
    found = bits(options, before, renews=True, loads=True, weighted=weighted)
    assert_same_bits(found, expected, "step")
    assert_same_on_all_ranks(found, "steps")
    without = bits(options, before, renews=True, loads=False, weighted=weighted)
    assert not torch.equal(without[SAVED], expected[SAVED]), "nothing to prove"


@ranks(3)
def test_rank_0_decides_on_all_ranks_also_on_those_that_have_no_state(rank: int) -> None:
    net = DistributedDataParallel(Net(), bucket_cap_mb=0.001)
    assert net.comm_state_dict()["bucket_order"] == []
    step(net, 0, False)
    state = net.comm_state_dict()
    assert (state["rank"], state["world_size"]) == (rank, 3)
    assert sorted(state["bucket_order"]) == sorted(name for name, _ in Net().named_parameters())
    other = DistributedDataParallel(Net(), bucket_cap_mb=0.001, transport="process_group")
    assert other._ddp_state.core.bucket_set.names != state["bucket_order"], "nothing to prove"
    with recorded_collectives() as calls:
        other.load_comm_state_dict(*([state] if rank < 2 else []))
    assert calls.names == ["all_to_all_single"]
    assert other.comm_state_dict() == state
    before = other.reducer.counters.collectives
    step(other, 1, False)
    assert other.comm_state_dict()["bucket_order"] == state["bucket_order"]
    assert other.reducer.counters.collectives - before == len(other.reducer.buckets), "agreed anew"
    step(other, 2, False)
    assert_same_on_all_ranks(list(other.parameters()))


@ranks(2)
def test_a_state_of_another_module_places_what_there_is() -> None:
    net = DistributedDataParallel(Net())
    state = net.comm_state_dict()
    state |= {"bucket_order": ["middle.bias", "gone", "first.weight"]}
    state["wires"] = [2, 0]  # of an earlier version
    net.load_comm_state_dict(state)
    names = net._ddp_state.core.bucket_set.names
    assert names[:2] == ["middle.bias", "first.weight"]
    assert sorted(names) == sorted(name for name, _ in Net().named_parameters())
    step(net, 0, False)
    assert_same_on_all_ranks(list(net.parameters()))


@ranks(2)
def test_an_empty_state_changes_nothing() -> None:
    net = DistributedDataParallel(Net())
    names = net._ddp_state.core.bucket_set.names
    net.load_comm_state_dict(net.comm_state_dict())
    net.load_comm_state_dict()
    assert net._ddp_state.core.bucket_set.names == names
    step(net, 0, False)
    assert net._ddp_state.core.bucket_set.names != names, "the order of gradients is observed"


@ranks(2)
def test_a_state_is_refused_inside_a_backward(rank: int) -> None:
    net = DistributedDataParallel(Net())
    step(net, 0, False)
    state = net.comm_state_dict()
    errors = []

    def hook(_: Tensor) -> None:
        with pytest.raises(RuntimeError, match="between two steps") as error:
            net.load_comm_state_dict(state)
        errors.append(str(error.value))

    handle = net.module.last.bias.register_hook(hook)
    step(net, 1, False)
    handle.remove()
    assert errors == [
        f"rank {rank}, step 2: load_comm_state_dict() was called while a backward runs: "
        "call it between two steps"
    ]
    assert_same_on_all_ranks(list(net.parameters()))
