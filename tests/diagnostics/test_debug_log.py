"""Buckets and reductions in the log at level DEBUG, and in ``torch.profiler``."""

import logging

import pytest
from distributed import ranks
from logged import logged
from modules import Layers, mlp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.profiler import profile
from training import WAYS, drawn, train_step, wrap


@ranks(2)
def test_records_of_buckets_and_reductions(rank: int) -> None:
    net = Layers([*"abcd", "unused"], 6, order="abcd")
    with logged(logging.DEBUG) as kept:
        ddp = wrap(net, bucket_cap_mb=1e-4, skip_all_reduce_unused_params=True)
        placed = kept.lines("buckets.manager")
        assert len(placed) == len(ddp.reducer.buckets)
        assert placed[0] == (
            f"rank {rank}, step 0: bucket 0 of {len(placed)}: 2 parameters, 42 elements, "
            "168 bytes, sent in torch.float32, on cpu: layers.unused.bias, layers.unused.weight"
        )
        for _ in range(3):
            kept.records.clear()
            train_step(ddp, drawn(3, 6))
        (begins,) = [line for line in kept.lines("comm.reduction") if "starts" in line]
        unused = [bucket.index for bucket in ddp.reducer.buckets if "unused" in bucket.names[0]]
        assert begins.startswith(
            f"rank {rank}, step 3: reduction starts: the first backward through a forward, no wei"
        )
        assert begins.endswith(f"skipped buckets: {unused}")
        of_buckets = kept.lines("comm.reduction")
        sent = [bucket for bucket in ddp.reducer.buckets if bucket.index not in unused]
        for what in ("is sent", "is reduced"):
            assert [line for line in of_buckets if what in line] == [
                f"rank {rank}, step 3, {bucket.title}: {what}, {bucket.nbytes} bytes"
                for bucket in sent
            ]
        kept.records.clear()
        ddp.register_comm_hook(None, allreduce_hook)
        train_step(ddp, drawn(3, 6))
        for what in ("is passed to", "has returned from"):
            lines = [line for line in kept.lines("comm.reduction") if f"{what} the comm" in line]
            assert len(lines) == len(sent)


STEPS = ("pack", "launch", "wait", "unpack")


def spans(net: nn.Module) -> list[str]:
    """The spans of a step, in the order of their start, without their common prefix."""
    with profile() as profiler:
        train_step(net, drawn(5, 4))
    events = sorted(profiler.events(), key=lambda each: each.time_range.start)
    found = [each.name.partition("tritonddp: ")[2] for each in events]
    return [each for each in found if each]


@pytest.mark.parametrize("way", ["copies", "int8"])
@ranks(2)
def test_a_profiler_shows_the_steps_of_each_bucket_in_order(way: str) -> None:
    net = wrap(mlp(4, 8, 8, 2), bucket_cap_mb=3e-4, **WAYS[way])
    for number in range(4):  # buckets are rebuilt after the first
        found = spans(net)
        if number:
            assert sorted(found) == sorted(f"{step} bucket {n}" for step in STEPS for n in (0, 1))
        for step in STEPS:
            assert found.index(f"{step} bucket 0") < found.index(f"{step} bucket 1")
        for n in "01":
            mine = [each.split()[0] for each in found if each.endswith(n)]
            assert tuple(dict.fromkeys(mine)) == STEPS
        assert found.index("launch bucket 1") < found.index("wait bucket 0")
