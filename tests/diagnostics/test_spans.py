"""Spans of buckets in ``torch.profiler``."""

import pytest
from distributed import ranks
from modules import mlp
from torch import nn
from torch.profiler import profile
from training import WAYS, drawn, train_step

from tritonddp import DistributedDataParallel

STEPS = ("pack", "launch", "wait", "unpack")


def spans(net: nn.Module) -> list[str]:
    """The spans of a step, in the order of their start."""
    with profile() as profiler:
        train_step(net, drawn(5, 4))
    found = [each for each in profiler.events() if each.name.startswith("tritonddp: ")]
    return [each.name for each in sorted(found, key=lambda each: each.time_range.start)]


@pytest.mark.parametrize("way", ["copies", "int8"])
@ranks(2)
def test_a_profiler_shows_the_steps_of_each_bucket_in_order(way: str) -> None:
    net = DistributedDataParallel(mlp(4, 8, 8, 2), bucket_cap_mb=3e-4, **WAYS[way])
    for number in range(4):  # buckets are rebuilt after the first
        found = spans(net)
        buckets = range(len(net.reducer.buckets))
        if number:
            assert len(buckets) == 2
            assert sorted(found) == sorted(
                f"tritonddp: {s} bucket {n}" for s in STEPS for n in buckets
            )
        for step in STEPS:
            first, second = (found.index(f"tritonddp: {step} bucket {n}") for n in range(2))
            assert first < second
        for n in range(2):
            mine = [each.split()[1] for each in found if each.endswith(str(n))]
            assert tuple(dict.fromkeys(mine)) == STEPS
        assert found.index("tritonddp: launch bucket 1") < found.index("tritonddp: wait bucket 0")
