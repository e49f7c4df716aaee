"""Names of stock DDP's class and reducer that frameworks read and call."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, assert_same_on_all_ranks, ranks, sequence_number
from modules import Two
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as Stock
from training import drawn

from tritonddp import DistributedDataParallel

# Errors of the constructor

REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "doesn't have any parameter that requires a gradient": (nn.ReLU, {}),
    "only be None or contain a single element": (Two, {"device_ids": [0, 1]}),
    "device_ids and output_device arguments only work with": (Two, {"device_ids": [0]}),
    "Modules with uninitialized parameters can't be used": (lambda: nn.LazyLinear(2), {}),
    "SyncBatchNorm layers only work with GPU modules": (lambda: nn.SyncBatchNorm(2), {}),
    "must be on the same type of devices": (
        lambda: nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta")),
        {},
    ),
    "need to be set at the same time": (Two, {"param_to_hook_all_reduce": torch.ones(1)}),
    "Cannot specify both process_group and device_mesh": (Two, {"device_mesh": (2,), "group": 1}),
    "Only 1D device mesh is supported, but got": (Two, {"device_mesh": (2, 1)}),
}


@ranks(2)
def test_errors_of_the_constructor_have_stocks_types_and_words() -> None:
    warnings.filterwarnings("ignore", "Lazy modules")
    for phrase, (make, given) in REFUSED.items():
        options = dict(given)
        if "device_mesh" in options:
            options["device_mesh"] = init_device_mesh("cpu", options["device_mesh"])
        if options.pop("group", None):
            options["process_group"] = dist.group.WORLD
        errors = []
        for kind in (Stock, DistributedDataParallel):
            with pytest.raises((RuntimeError, ValueError), match=phrase) as caught:
                kind(make(), **options)
            errors.append(caught.type)
        assert errors[0] is errors[1], phrase


# Parameters and buffers


@pytest.mark.parametrize("init_sync", [True, False])
@ranks(2)
def test_ignored_parameters_and_buffers_stay_each_ranks_own(init_sync: bool) -> None:
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model.register_parameter("scale", nn.Parameter(torch.ones(1)))
    torch.manual_seed(rank)
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data.fill_(rank)
    # The recipe of torch's docstring puts a dot before names of the outermost module.
    ignored = ["0.bias", "1.running_mean", ".scale" if init_sync else "scale"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    net = DistributedDataParallel(model, init_sync=init_sync)
    assert net.parameters_to_ignore == {"0.bias", "1.running_mean", "scale"}
    expected = 0 if init_sync else rank
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        is_ignored = name in net.parameters_to_ignore
        assert tensor.eq(rank if is_ignored else expected).all(), name
        assert hasattr(tensor, "_ddp_ignored") is is_ignored, name
    model.scale.grad = torch.tensor([float(rank)])
    net(drawn(4, 3)).sum().backward()
    assert model.scale.grad.item() == rank
    names = [name for name, _ in net._get_data_parallel_params(model, named_params=True)]
    assert names == ["0.weight", "1.weight", "1.bias"]
    assert [id(p) for p in net._get_data_parallel_params(model)] == [
        id(model.get_parameter(name)) for name in names
    ]


@ranks(2)
def test_bucket_sizes_read_as_in_stock() -> None:
    cases: list[dict[str, Any]] = [{}, {"bucket_cap_mb": 1.5}, {"bucket_cap_mb_list": [2, 1]}]
    for options in cases:
        ours, stock = DistributedDataParallel(Two(), **options), Stock(Two(), **options)
        for name in ("bucket_bytes_cap", "bucket_bytes_cap_default"):
            assert getattr(ours, name) == getattr(stock, name), name
        sizes = getattr(stock, "bucket_bytes_cap_list", [])  # torch 2.11
        assert ours.bucket_bytes_cap_list == sizes


# Options that are set late


@ranks(2)
def test_a_static_graph_is_set_before_training_and_once() -> None:
    net = DistributedDataParallel(Two(), find_unused_parameters=False)
    net._set_static_graph()
    assert net.static_graph
    for _ in range(3):  # strict mode would raise
        net(drawn(4, 3), both=False).sum().backward()
    with pytest.warns(UserWarning, match="no need to set it again"):
        net._set_static_graph()
    late = DistributedDataParallel(Two(), find_unused_parameters=False)
    late(drawn(4, 3))
    expected = "should be called before training loop starts and after DistributedDataParallel"
    with pytest.raises(RuntimeError, match=expected):
        late._set_static_graph()
    assert not late.static_graph
    with pytest.warns(UserWarning, match="You passed find_unused_parameters=true"):
        DistributedDataParallel(Two(), find_unused_parameters=True)._set_static_graph()
    with pytest.warns(UserWarning, match="You passed find_unused_parameters=true"):
        DistributedDataParallel(Two(), find_unused_parameters=True, static_graph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DistributedDataParallel(Two(), static_graph=True)


@ranks(2)
def test_a_static_graph_reports_its_first_backward() -> None:
    """sentence-transformers reads the attribute."""
    for kind in DistributedDataParallel, Stock:
        net = kind(Two(), static_graph=True)
        output = net(drawn(4, 3))
        assert net._static_graph_delay_allreduce_enqueued is False
        output.sum().backward()
        assert net._static_graph_delay_allreduce_enqueued is True


# The reducer


@ranks(2)
def test_gradients_are_local_without_the_hooks_of_the_wrapper() -> None:
    net = DistributedDataParallel(Two())
    x = drawn(4, 3)
    output = net(x)
    net._remove_autograd_hooks()
    output.sum().backward()
    own = [param.grad.clone() for param in net.parameters()]
    net.zero_grad()
    net.module(x).sum().backward()
    for param, grad in zip(net.parameters(), own, strict=True):
        assert_same_bits(param.grad, grad)


@ranks(2)
def test_buckets_count_as_rebuilt_once_their_order_is_known() -> None:
    """ZeRO's hooks do nothing before."""
    for static_graph in (False, True):
        net = DistributedDataParallel(Two(), static_graph=static_graph)
        with net.no_sync():
            net(drawn(4, 3)).sum().backward()
        assert not net._has_rebuilt_buckets
        for number in range(1, 4):
            net(drawn(4, 3)).sum().backward()
            assert net._has_rebuilt_buckets is (number > 2 * static_graph)
    net.register_comm_hook(None, lambda _, bucket: net.reducer._run_allreduce_hook(bucket))
    net.reducer._delay_all_reduce()
    assert net.reducer._rebuild_buckets() is False
    net._set_ddp_sink_clone(False)
    net(drawn(4, 3)).mul_(2).sum().backward()
    assert_same_on_all_ranks([param.grad for param in net.parameters()])


@ranks(2)
def test_methods_that_are_rarely_called() -> None:
    for module in ("no module", 3):
        with pytest.raises(TypeError, match=r"should be|must be"):
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["a"])
    net = DistributedDataParallel(nn.BatchNorm1d(2), transport="process_group")
    before = sequence_number()
    net.broadcast_bucket_size = 8
    net._sync_buffers()
    assert sequence_number() - before > 1
    with pytest.raises(TypeError, match="list of parameters, got 3"):
        net._build_debug_param_to_name_mapping(3)
    net.broadcast_buffers = False
    assert not net.forward_sync_buffers
    net.reducer._remove_autograd_hooks()
    before = sequence_number()
    net(torch.ones(3, 2)).sum().backward()
    assert sequence_number() == before
