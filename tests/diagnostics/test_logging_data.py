"""``_get_ddp_logging_data()``: fields, values and times."""

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from distributed import ranks
from modules import Two
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Stock
from training import train_step

from tritonddp import DistributedDataParallel

TIMES = ["forward_compute_time", "backward_compute_time", "backward_comm_time"]
TIMES += ["backward_compute_comm_overlap_time"]
# The order of these times in a step whose communication overlaps the backward.
STAMPS = [
    "forward_compute_time_start",
    "backward_compute_time_start",
    "backward_comm_time_start",
    "backward_compute_time_end",
    "backward_comm_time_end",
]
MEASURED = {*TIMES, *(f"avg_{name}" for name in TIMES), *STAMPS}


def step(net: nn.Module, both: bool = True) -> None:
    train_step(net, torch.randn(4, 3), both, loss=torch.sum)


def clock() -> Any:
    """A clock that counts its reads."""
    return mock.patch("tritonddp._device.time.perf_counter_ns", itertools.count(1).__next__)


@pytest.mark.parametrize("finds", [False, True])
@ranks(2)
def test_fields_and_values_are_those_of_stock(finds: bool) -> None:
    options: dict[str, Any] = {"find_unused_parameters": finds, "broadcast_buffers": finds}
    options |= {"gradient_as_bucket_view": not finds, "bucket_cap_mb": 25 if finds else 0.00003}
    ours, stock = (kind(Two(), **options) for kind in (DistributedDataParallel, Stock))
    for steps in (0, 4):  # stock reports rebuilt buckets one step later
        for _ in range(steps):
            step(ours)
            step(stock)
        expected, data = stock._get_ddp_logging_data(), ours._get_ddp_logging_data()
        for name, value in expected.items():
            assert type(data.get(name)) is type(value), name
            # Stock begins with a single bucket, whatever its size.
            if name not in MEASURED and (finds or name != "bucket_sizes"):
                assert data[name] == value, name
        new = {"num_buckets_reduced", "unused_parameter_size", "has_rebuilt_buckets"}
        assert data.keys() - expected.keys() <= (set() if steps else new)
    assert data["iteration"] == 3


@ranks(2)
def test_the_values_follow_what_happens() -> None:
    net = DistributedDataParallel(Two(), bucket_cap_mb=0.00003, find_unused_parameters=False)
    before = net._get_ddp_logging_data()
    assert before["bucket_sizes"] == "32, 36"
    assert before["num_buckets_reduced"] == 0
    assert not {"error", "has_error", "static_graph"} & before.keys()
    step(net)
    data = net._get_ddp_logging_data()
    assert data["num_buckets_reduced"] == 2
    assert data["prev_iteration_grad_ready_order_indices"] == "2, 1, 0"
    assert data["rebuilt_bucket_sizes"] == "32, 36"
    assert data["rebuilt_per_bucket_param_indices"] == "2 1, 0"
    assert data["unused_parameter_size"] == 0
    assert net.reducer._ddp_graph_static()
    assert "can_set_static_graph" not in data, "Lightning would advise a static graph"
    step(net, both=False)
    data = net._get_ddp_logging_data()
    assert data["unused_parameter_size"] == 32
    assert not net.reducer._ddp_graph_static()
    with pytest.raises(RuntimeError) as caught:
        net(torch.randn(4, 3))
    data = net._get_ddp_logging_data()
    assert data["has_error"] == 1
    assert data["error"] == str(caught.value)
    assert data["iteration"] == 3


# Times


@ranks(2)
def test_times_are_those_of_the_parts_of_a_step() -> None:
    with clock():
        net = DistributedDataParallel(Two())
        step(net)
        with torch.no_grad():
            net(torch.randn(4, 3))
        with net.no_sync():
            step(net)
        assert not MEASURED & net._get_ddp_logging_data().keys()
        step(net)
        data = net._get_ddp_logging_data()
        # The first backward sends at its end, without overlap.
        for prefix in "", "avg_":
            assert [data[prefix + name] for name in TIMES] == [1, 1, 1, 0]
        step(net)
        data = net._get_ddp_logging_data()
        assert [data[name] for name in TIMES] == [1, 2, 2, 1]
        assert data["avg_backward_comm_time"] == 1  # 1.5, in whole nanoseconds
        first = data[STAMPS[0]]
        assert [data[name] - first for name in STAMPS] == [0, 1, 2, 3, 4]


@ranks(2)
def test_only_sampled_steps_read_the_clock() -> None:
    with clock():
        net = DistributedDataParallel(Two())
        net._set_ddp_runtime_logging_sample_rate(4)
        seen = []
        for _ in range(21):
            step(net)
            seen.append(net._get_ddp_logging_data()["iteration"])
    # The times of a step are read when the next step begins.
    assert seen == [*range(10), 10, 10, 12, 12, 12, 12, 16, 16, 16, 16, 20]
    with pytest.raises(ValueError, match="sample rate should be equal or greater than 1"):
        net._set_ddp_runtime_logging_sample_rate(0)
    with pytest.raises(TypeError, match=r"should be an integer, got 2\.5"):
        net._set_ddp_runtime_logging_sample_rate(2.5)
    assert "sample rate" in net._get_ddp_logging_data()["error"]
