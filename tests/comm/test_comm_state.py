"""``comm_state_dict()``: a new wrapper that loads it continues with the same bits."""

import io
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
from on_hosts import on_hosts
from torch import Tensor, nn
from training import descend, drawn

from tritonddp import DistributedDataParallel, Int8

STEPS, SAVED = 7, 3


class Net(nn.Module):
    """Gradients are not ready in the reverse order of registration: buckets are rebuilt."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(40, 5)
        self.first = nn.Linear(7, 60)
        self.middle = nn.Linear(60, 40)  # large enough to be quantized

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).relu()).relu())


def step(net: Any, seed: int) -> None:
    """One step of gradient descent; ranks have other inputs, and other numbers of them."""
    items = 3 + 5 * dist.get_rank()
    net.zero_grad()
    with net.weighted(items):
        net(drawn(items, 7, step=seed)).pow(2).mean().backward()
    descend(net, 0.05)


def wrapped(module: nn.Module, how: str) -> Any:
    if "hosts" not in how:
        return in_rings(module, **CASES[how])  # whose sums depend on the order of buckets
    with on_hosts(2):
        return DistributedDataParallel(module, process_group=dist.new_group(), **CASES[how])


def bits(how: str, renews: bool = True, loads: bool = True) -> Any:
    """Parameters and gradients after each step.

    Args:
        how: one of ``CASES``.
        renews: another wrapper continues after ``SAVED`` steps.
        loads: it loads the state.
    """
    torch.manual_seed(0)
    net, result = wrapped(Net(), how), []
    for seed in range(STEPS):
        if seed == SAVED and renews:
            memory = io.BytesIO()
            torch.save([net.module.state_dict(), net.comm_state_dict()], memory)
            memory.seek(0)
            saved, state = torch.load(memory, weights_only=True)
            torch.manual_seed(1)
            module = Net()
            module.load_state_dict(saved)
            net = wrapped(module, how)
            if loads:
                net.load_comm_state_dict(state)
        step(net, seed)
        tensors = [each for p in net.parameters() for each in (p.detach(), p.grad)]
        result.append(torch.cat([tensor.flatten() for tensor in tensors]))
    return result


SMALL = {"bucket_cap_mb": 0.001}
CASES: dict[str, dict[str, Any]] = {
    "views": {**SMALL, "gradient_as_bucket_view": True},
    "fp16": {"reduce_dtype": torch.float16},
    "int8": {"compression": "int8"},
    "hosts, sums": {"compression": Int8(error_feedback="sums"), "bucket_cap_mb": 0.01},
}


@pytest.mark.parametrize("how", CASES)
@ranks(4)
def test_a_new_wrapper_with_the_state_continues_with_the_same_bits(how: str) -> None:
    expected, found = (bits(how, renews) for renews in (False, True))
    assert_same_bits(found, expected, "step")
    assert_same_on_all_ranks(found, "steps")
    if "hosts" not in how:
        without = bits(how, loads=False)
        assert not torch.equal(without[SAVED], expected[SAVED]), "nothing to prove"


@ranks(3)
def test_rank_0_decides_on_all_ranks_even_on_those_without_a_state(rank: int) -> None:
    net = DistributedDataParallel(Net(), **SMALL)
    assert net.comm_state_dict()["bucket_order"] == []
    step(net, 0)
    state = net.comm_state_dict()
    assert (state["rank"], state["world_size"]) == (rank, 3)
    assert sorted(state["bucket_order"]) == sorted(name for name, _ in Net().named_parameters())
    other = DistributedDataParallel(Net(), **SMALL, transport="process_group")
    assert other._ddp_state.core.bucket_set.names != state["bucket_order"], "nothing to prove"
    with recorded_collectives() as calls:
        other.load_comm_state_dict(*([state] if rank < 2 else []))
    assert calls.names == ["all_to_all_single"]
    assert other.comm_state_dict() == state
    before = other.reducer.counters.collectives
    step(other, 1)
    assert other.comm_state_dict()["bucket_order"] == state["bucket_order"]
    sent = other.reducer.counters.collectives - before
    assert sent == len(other.reducer.buckets), "the ranks agreed on the order again"
    step(other, 2)
    assert_same_on_all_ranks(list(other.parameters()))


@ranks(1)
def test_a_state_is_refused_during_a_backward() -> None:
    net = DistributedDataParallel(Net())
    step(net, 0)
    state = net.comm_state_dict()
    net.module.last.bias.register_hook(lambda _: net.load_comm_state_dict(state))
    error = (
        r"rank 0, step 2: load_comm_state_dict\(\) .* during a backward: call it between two steps"
    )
    with pytest.raises(RuntimeError, match=error):
        step(net, 1)
