"""``world_size == 1``: nothing is exchanged, and gradients stay in their own memory."""

import torch
from differential.named.models import Branches, batch
from distributed import ranks, recorded_collectives
from oracle import assert_mean, one_per_rank, seed
from torch import nn
from training import train_step, wrap

from tritonddp.diagnostics import logging_data


@ranks(1, views=True)
def test_nothing_is_exchanged(view: bool) -> None:
    """The used layers change between steps. Gradients are kept, set to zero or dropped."""
    module = Branches().double()
    ddp = wrap(module, view, bucket_cap_mb=1e-6)
    alone = one_per_rank(module)
    names = ["abc", "ab", "a", "cba", "ab"]
    for number in range(logging_data.FIRST + 10):
        for net in (*alone, ddp):
            if number % 3:
                net.zero_grad(set_to_none=number % 3 == 1)
        before = ddp.reducer.counters.collectives
        with recorded_collectives() as calls:
            for net in (*alone, ddp):
                seed(0, number)
                if number % 4 == 3:
                    with net.no_sync():
                        net(batch(), "bd").sum().backward()
                net(batch(), names[number % 5]).sum().backward()
            assert not calls.on_the_group
            assert not calls.names
            assert ddp.reducer.counters.collectives == before
        assert ddp.reducer.counters.reductions == number + 1
        assert_mean(ddp, alone, f"step {number}")


@ranks(1, views=True)
def test_gradients_are_not_copied_and_buckets_have_no_memory(view: bool) -> None:
    ddp = wrap(nn.Linear(4, 3), view)
    # In some steps the gradients go through buckets, to measure times for the logging data.
    ddp.logger.sampler.next_sample = 1 << 60
    for step in range(1, 5):
        train_step(ddp, torch.full((2, 4), float(step)), loss=torch.sum)
        assert ddp.module.weight.grad.eq(2 * step).all()
        assert not ddp.module.weight.grad._is_view()
        assert [bucket.flat for bucket in ddp.reducer.buckets] == [None]
