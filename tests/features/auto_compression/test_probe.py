"""What is measured for the cost model: everything, alike on all ranks, and nothing is disturbed."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import gather, ranks

from tritonddp.buckets.bucket import Bucket
from tritonddp.coordination.counters import Counters
from tritonddp.features.auto_compression import probe
from tritonddp.features.auto_compression.cost_model import Kind, Speed
from tritonddp.features.auto_compression.probe import Figures, Way, measure
from tritonddp.kernels.dispatch import select

CPU = torch.device("cpu")
STEPS = ("fill", "reduce", "empty")


def make(
    index: int, first: int, params: Any, names: list[str], kind: Any = Bucket, **options: Any
) -> Bucket:
    kernels = select(CPU, params[0].dtype)
    return kind(index, params, names, kernels, Counters(), first=first, **options)


def ways() -> dict[torch.dtype, dict[str, Way]]:
    fp32, bf16 = torch.float32, torch.bfloat16
    return {
        fp32: {
            "float32": Way(make, [(Kind.ALL_REDUCE, fp32)]),
            "bfloat16": Way(partial(make, wire_dtype=bf16), [(Kind.ALL_REDUCE, bf16)]),
        },
        bf16: {"bfloat16": Way(make, [(Kind.ALL_REDUCE, bf16)])},
    }


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements of a few milliseconds, whose figures mean nothing."""
    monkeypatch.setattr(probe, "_LAST_SIZE", 256 << 10)
    monkeypatch.setattr(probe, "_MANY", 4 << 10)
    monkeypatch.setattr(probe, "_CACHES", 1 << 10)
    monkeypatch.setattr(probe, "_PATIENCE", 1e-9)  # one round


@ranks(2, 3)
def test_all_is_measured_and_every_rank_has_the_same_figures() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        small(monkeypatch)
        figures = measure(dist.group.WORLD, CPU, ways())
    assert figures.world_size == dist.get_world_size()
    assert figures.dtypes == [torch.bfloat16, torch.float32]
    assert set(figures.speeds) == {(Kind.ALL_REDUCE, "float32"), (Kind.ALL_REDUCE, "bfloat16")}
    for speed in figures.speeds.values():
        assert speed.call > 0
        assert 0 <= speed.core <= speed.byte
    for dtype, of_dtype in ways().items():
        for wire in of_dtype:
            kernels = {step: figures.kernel(dtype, wire, step) for step in STEPS}
            assert kernels["fill"].launch + kernels["fill"].element > 0
            assert kernels["reduce"].seconds(1e6) == 0  # there is nothing between two collectives
    assert 0 < figures.cores <= 1024
    assert figures.took > 0
    assert gather(figures) == [figures] * dist.get_world_size()


@ranks(2)
def test_the_slowest_rank_counts(rank: int) -> None:
    class Slow(Bucket):
        def pack(self, *args: Any) -> None:
            if rank == 1:
                torch.empty(1 << 22).normal_()  # milliseconds
            super().pack(*args)

    fp32 = torch.float32
    both = {fp32: {"float32": Way(partial(make, kind=Slow), [(Kind.ALL_REDUCE, fp32)])}}
    with pytest.MonkeyPatch.context() as monkeypatch:
        small(monkeypatch)
        figures = measure(dist.group.WORLD, CPU, both)
    # Of a launch and its elements together: a pause of the machine may count as either's.
    few = probe._GRADIENTS * probe._FEW
    assert figures.kernel(fp32, "float32", "fill").seconds(few) > 2e-3
    assert gather(figures) == [figures] * 2


@ranks(2)
def test_random_numbers_and_the_collectives_of_others_are_left_alone() -> None:
    state = torch.get_rng_state()
    pending = dist.all_reduce(torch.ones(1), async_op=True)
    with pytest.MonkeyPatch.context() as monkeypatch, torch.no_grad():
        small(monkeypatch)
        measure(dist.group.WORLD, CPU, ways())
    pending.wait()
    assert torch.equal(state, torch.get_rng_state())


@ranks(2)
def test_messages_grow_until_they_take_long_enough() -> None:
    sizes: list[int] = []
    line = probe._Lines(dist.group.WORLD, CPU)
    seconds = {256 << 10: 3e-3, 1 << 20: 12e-3, 4 << 20: 48e-3}

    def timed(call: tuple[Kind, torch.dtype, int]) -> tuple[float, float]:
        sizes.append(call[2])
        return seconds[call[2]], 0.0

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(line, "_collective", lambda *args: args)
        monkeypatch.setattr(line, "_timed", timed)
        assert line._find_size(Kind.ALL_REDUCE, torch.float32, least=1e-4) == 4 << 20
        assert sizes == list(seconds)
        # On a line of long latency 48 ms would say little of the bandwidth.
        seconds[16 << 20] = 192e-3
        assert line._find_size(Kind.ALL_REDUCE, torch.float32, least=10e-3) == 16 << 20


def test_figures_say_what_they_are_of() -> None:
    seconds = {
        "all-reduce float32: call": 1.0,
        "all-reduce float32: byte": 2.0,
        "all-reduce float32: core": 0.5,
        "float32 as int8: fill, launch": 3.0,
        "float32 as int8: fill, element": 4.0,
    }
    figures = Figures(2, 1.0, seconds, 0.1)
    assert figures.speeds == {(Kind.ALL_REDUCE, "float32"): Speed(1.0, 2.0, 0.5)}
    assert figures.kernel(torch.float32, "int8", "fill").seconds(10) == 43
    assert figures.dtypes == [torch.float32]
