"""What frameworks read and call of stock's class and reducer is here, and tells the truth."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, assert_same_on_all_ranks, gather, ranks
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as Stock
from torch.nn.parallel.distributed import _BufferCommHookLocation

from tritonddp import DistributedDataParallel


class Two(nn.Module):
    """Two layers; the second one is used on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 2)

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        x = self.first(x)
        return self.second(x) if both else x


def batch() -> Tensor:
    return torch.randn(4, 3) + dist.get_rank()


# What the constructor refuses

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


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("phrase", REFUSED)
@ranks(2)
def test_what_the_constructor_refuses_is_an_error_of_stocks_kind_and_words(phrase: str) -> None:
    make, options = REFUSED[phrase]
    options = dict(options)
    if "device_mesh" in options:
        options["device_mesh"] = init_device_mesh("cpu", options["device_mesh"])
    if options.pop("group", None):
        options["process_group"] = dist.group.WORLD
    errors = []
    for kind in (Stock, DistributedDataParallel):
        with pytest.raises((RuntimeError, ValueError), match=phrase) as caught:
            kind(make(), **options)
        errors.append(caught.type)
    assert errors[0] is errors[1]


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
    ignored = ["0.bias", "1.running_mean", ".scale"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    net = DistributedDataParallel(model, init_sync=init_sync)
    assert net.parameters_to_ignore == {"0.bias", "1.running_mean", "scale"}
    expected = 0 if init_sync else rank
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        is_ignored = name in net.parameters_to_ignore
        assert tensor.eq(rank if is_ignored else expected).all(), name
        assert hasattr(tensor, "_ddp_ignored") is is_ignored, name
    (net(batch()) * model.scale).pow(2).sum().backward()
    model.get_parameter("0.weight").grad = torch.full((3, 3), float(rank))
    net.reduce_gradients()
    assert model.get_parameter("0.weight").grad.eq(0.5).all()
    with net.no_sync():
        net.zero_grad()
        (net.module[0](batch()).sum() * model.scale).backward()
    own = model.scale.grad.clone()
    net(batch()).sum().backward()
    assert_same_bits(model.scale.grad, own)
    names = [name for name, _ in net._get_data_parallel_params(model, named_params=True)]
    assert names == ["0.weight", "1.weight", "1.bias"]
    assert [id(p) for p in net._get_data_parallel_params(model)] == [
        id(model.get_parameter(name)) for name in names
    ]
    assert list(map(id, net._module_parameters)) == [id(model.get_parameter(n)) for n in names]


@ranks(2)
def test_parameters_are_numbered_as_in_stock() -> None:
    def make() -> nn.Module:
        model = Two()
        model.embedding = nn.Embedding(2, 2)
        model.tied = model.first
        model.second.bias.requires_grad_(False)
        return model

    ours, stock = DistributedDataParallel(make()), Stock(make())
    for net in (ours, stock):
        params, sparse = net._build_params_for_reducer()
        assert net._build_debug_param_to_name_mapping(params) == {
            0: "first.weight",
            1: "second.weight",
            2: "embedding.weight",
        }
        assert sparse == [False, False, False]
        with pytest.raises(ValueError, match="Expected param to name mapping"):
            net._build_debug_param_to_name_mapping([*params, nn.Parameter(torch.ones(1))])
        with pytest.raises(ValueError, match=r"Param with name embedding\.weight"):
            net._build_debug_param_to_name_mapping(params[:2])


@ranks(2)
def test_buffers_are_looked_up_each_time() -> None:
    net = DistributedDataParallel(nn.BatchNorm1d(3))
    assert list(net.named_module_buffers) == ["running_mean", "running_var", "num_batches_tracked"]
    net.module.running_mean = torch.ones(3)
    net._assign_modules_buffers()
    assert net.modules_buffers[0] is net.module.running_mean


@pytest.mark.parametrize(
    "options",
    [{}, {"bucket_cap_mb": 1.5}, {"bucket_cap_mb_list": [2, 1]}],
    ids=["default", "one size", "list"],
)
@ranks(2)
def test_bucket_sizes_read_as_in_stock(options: dict[str, Any]) -> None:
    ours, stock = DistributedDataParallel(Two(), **options), Stock(Two(), **options)
    for name in ("bucket_bytes_cap", "bucket_bytes_cap_list", "bucket_bytes_cap_default"):
        assert getattr(ours, name) == getattr(stock, name), name


# Forward


@ranks(2)
def test_dynamo_finds_the_wrapper_that_is_at_work() -> None:
    seen: list[Any] = []

    class Looks(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            seen.append(Stock._get_active_ddp_module())
            x = self.inner(x)
            seen.append(DistributedDataParallel._get_active_ddp_module())
            return x

    inner = DistributedDataParallel(Looks(nn.Linear(3, 3)))
    outer = DistributedDataParallel(Looks(inner))
    outer(batch())
    assert list(map(id, seen)) == [id(outer), id(inner), id(inner), id(outer)]
    assert Stock._active_ddp_module is None
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        inner(torch.ones(2, 7))
    assert Stock._active_ddp_module is None


@ranks(2)
def test_a_module_in_tiny_buckets_can_be_compiled() -> None:
    """dynamo splits graphs by the size of buckets, and asserts that it is a MiB at least."""
    model = torch.compile(Two(), backend="eager")
    net: Any = DistributedDataParallel(model, bucket_cap_mb=0.5)
    net(batch()).sum().backward()
    assert_same_on_all_ranks([param.grad for param in net.parameters()])
    torch.compiler.reset()
    with pytest.raises(AssertionError, match="First bucket should be smaller"):
        Stock(model, bucket_cap_mb=0.5)(batch())
    assert Stock._active_ddp_module is None


@ranks(2)
def test_the_parts_of_a_forward_may_be_called_one_by_one() -> None:
    """As torch's `replicate` does around the forward of the module itself."""
    net = DistributedDataParallel(Two())
    inputs, kwargs = net._pre_forward(batch(), both=True)
    with net._inside_ddp_forward():
        output = net.module(*inputs, **kwargs)
    assert net._post_forward(output) is output
    output.sum().backward()
    assert_same_on_all_ranks([param.grad for param in net.parameters()])
    assert net._lazy_init_ran
    assert net._distributed_rank == dist.get_rank()
    x = batch()
    (moved,), (keywords,) = net.to_kwargs((x,), {"a": [x]}, 0)
    assert_same_bits(moved[0], x)
    assert_same_bits(keywords["a"][0], x)
    assert net.train(False) is net


class Trains(Two):
    """With a method of its own for training, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def train_step(self, x: Tensor) -> Tensor:
        self.began = self.seen.clone()
        self.seen += x.sum()
        return super().forward(x).sum()


class RunsAnotherMethod(DistributedDataParallel):
    """As OpenMMLab's wrapper for calls of the module itself."""

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self._inside_ddp_forward():
            return self.module.train_step(*inputs, **kwargs)


class HasAnotherForward(DistributedDataParallel):
    """As OpenMMLab's for train_step(), and what others have copied from torch."""

    def train_step(self, x: Tensor) -> Tensor:
        if not self._lazy_init_ran:
            self._lazy_init()
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self.logger.set_runtime_stats_and_log()
            self.reducer.prepare_for_forward()
        if self.reducer._rebuild_buckets():
            raise AssertionError("buckets are rebuilt elsewhere")
        if self._check_sync_bufs_pre_fwd():
            self._sync_buffers()
        loss = self.module.train_step(x)
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self.require_forward_param_sync = True
            self.reducer.prepare_for_backward([])
        else:
            self.require_forward_param_sync = False
        return loss

    __call__ = train_step


@pytest.mark.parametrize("location", [None, *_BufferCommHookLocation])
@pytest.mark.parametrize("kind", [RunsAnotherMethod, HasAnotherForward])
@ranks(2)
def test_subclasses_may_have_a_forward_of_their_own(kind: Any, location: Any) -> None:
    torch.manual_seed(0)
    module = Trains()
    alone = copy.deepcopy(module)
    net = kind(module)
    if location is not None:
        net._register_buffer_comm_hook(
            None, lambda state, buffers: net._default_broadcast_coalesced(), location
        )
    for _ in range(3):
        x = batch()
        net.zero_grad()
        alone.zero_grad()
        net(x).backward()
        alone.train_step(x).backward()
        for ours, own in zip(net.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, torch.stack(gather(own.grad)).mean(0))
        assert_same_on_all_ranks([module.began])
    is_last = location is _BufferCommHookLocation.POST_FORWARD
    assert net._check_sync_bufs_post_fwd() is is_last
    assert net._check_sync_bufs_pre_fwd() is not is_last
    assert (module.seen == gather(module.seen)[0]).item() is (is_last or dist.get_rank() == 0)


class HasStocksForward(DistributedDataParallel):
    """Copied from torch, of whatever version is installed."""

    forward = Stock.forward


class HasAllOfStocksForward(HasStocksForward):
    """And what that calls."""

    _pre_forward = Stock._pre_forward
    _post_forward = Stock._post_forward


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
@pytest.mark.parametrize("kind", [HasStocksForward, HasAllOfStocksForward])
@ranks(2)
def test_subclasses_may_have_copied_stocks_forward(kind: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    ours, theirs = DistributedDataParallel(copy.deepcopy(module)), kind(module, **options)
    for _ in range(3):
        x = batch()
        for net in ours, theirs:
            net.zero_grad()
            with net.no_sync():
                net(x).square().sum().backward()
            net(x).square().sum().backward()
        for mine, own in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert_same_bits(own.grad, mine.grad)
        assert_same_bits(theirs.module[1].running_mean, ours.module[1].running_mean)


@ranks(2)
def test_a_copy_of_stocks_forward_can_be_joined() -> None:
    torch.manual_seed(0)
    module = nn.Linear(3, 3)
    nets = [DistributedDataParallel(copy.deepcopy(module)), HasStocksForward(module)]
    for net in nets:
        with net.join():
            for _ in range(1 + dist.get_rank()):
                net(torch.ones(2, 3)).sum().backward()
    for mine, own in zip(*(net.parameters() for net in nets), strict=True):
        assert_same_bits(own.grad, mine.grad)


@pytest.mark.parametrize("is_first", [True, False])
@ranks(2)
def test_a_copy_of_all_of_it_cannot_be_joined_and_is_told_what_to_call(is_first: bool) -> None:
    net, other = HasAllOfStocksForward(nn.Linear(3, 3)), DistributedDataParallel(nn.Linear(3, 3))
    joined = [net, other] if is_first else [other, net]
    with Join(joined):
        if not is_first:
            other(torch.ones(2, 3)).sum().backward()
        with pytest.raises(RuntimeError, match=r"call self\._pre_forward"):
            net(torch.ones(2, 3))


# Unused parameters


class Backwards(Two):
    """Registered in another order than used, so that buckets are rebuilt after the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self._modules.pop("first")


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("kind", [Two, Backwards])
@ranks(2, 3)
def test_the_map_of_used_parameters_counts_ranks(kind: type[Two], lazy: bool) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    net = DistributedDataParallel(kind(), lazy_bucket_allocation=lazy)
    assert net.reducer._get_local_used_map().tolist() == [0, 0, 0]
    for both, counts in [
        ([True] * world_size, [world_size] * 3),
        ([True, *[False] * (world_size - 1)], [world_size, 1, 1]),
        ([False] * world_size, [world_size, 0, 0]),
        ([False, *[True] * (world_size - 1)], [world_size, world_size - 1, world_size - 1]),
    ]:
        net(batch(), both[rank]).sum().backward()
        used = net.reducer._get_local_used_map()
        assert used.dtype is torch.int32
        assert used.tolist() == (counts if kind is Two else [*counts[1:], counts[0]])


@ranks(2)
def test_a_graph_counts_as_static_while_a_rank_reaches_the_same_parameters() -> None:
    net = DistributedDataParallel(Two())
    for _ in range(4):
        net(batch(), both=dist.get_rank() == 0).sum().backward()
        assert net.reducer._ddp_graph_static()
    with net.no_sync():
        net(batch()).sum().backward()
    net(batch()).sum().backward()
    assert gather(net.reducer._ddp_graph_static()) == [True, False]


@contextmanager
def debug_level(level: str) -> Iterator[None]:
    before = dist.get_debug_level()
    dist.set_debug_level(getattr(dist.DebugLevel, level))
    try:
        yield
    finally:
        dist.set_debug_level(before)


def many() -> nn.Module:
    model = Two()
    model.frozen = nn.Linear(2, 2).requires_grad_(False)
    model.extra = nn.ModuleList(nn.Linear(2, 2) for _ in range(6))
    return model


@pytest.mark.parametrize("level", ["OFF", "INFO", "DETAIL"])
@ranks(2)
def test_the_error_of_strict_mode_has_stocks_phrases_and_numbers(level: str) -> None:
    rank = dist.get_rank()
    errors = []
    with debug_level(level):
        for kind in (DistributedDataParallel, Stock):
            net: Any = kind(many(), find_unused_parameters=False)
            net(batch()).sum().backward()
            with pytest.raises(RuntimeError) as caught:
                net(batch())
            errors.append(str(caught.value))
    unused = [f"extra.{i}.{kind}" for i in range(6) for kind in ("weight", "bias")]
    phrases = [
        "Expected to have finished reduction in the prior iteration before starting a new one",
        "passing the keyword argument `find_unused_parameters=True`",
        "`forward` function outputs participate in calculating loss",
        f"Parameter indices which did not receive grad for rank {rank}: "
        + " ".join(map(str, range(3, 15))),
    ]
    if level == "OFF":
        phrases.append(
            "set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL"
        )
        assert f"for rank {rank}: {', '.join(unused[:10])}, and 2 more" in errors[0]
    else:
        names = ", ".join(unused)
        assert f"Parameters which did not receive grad for rank {rank}: {names}" in errors[0]
    for phrase in phrases:
        for error in errors:
            assert phrase in error, error
    assert "Since `find_unused_parameters=True` is enabled" not in errors[0]


@ranks(2)
def test_strict_mode_raises_when_stock_does() -> None:
    for kind in (DistributedDataParallel, Stock):
        net: Any = kind(Two(), find_unused_parameters=False)
        net._check_reducer_finalized()
        net(batch(), both=False).sum().backward()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
                net._check_reducer_finalized()
        with torch.no_grad():
            net(batch())
        with net.no_sync(), pytest.raises(RuntimeError, match="Expected to have finished"):
            net(batch())


@ranks(2)
def test_an_unfinished_backward_is_seen_without_waiting() -> None:
    net = DistributedDataParallel(Two())
    seen: list[str] = []

    def look(_: Tensor) -> None:
        with pytest.raises(RuntimeError, match="Expected to have finished reduction") as caught:
            net._check_reducer_finalized()
        seen.append(str(caught.value))
        raise KeyError("a hook of the user's")

    handle = net.module.first.weight.register_hook(look)
    with pytest.raises(KeyError):
        net(batch()).sum().backward()
    assert "still runs" in seen[0]
    handle.remove()
    with pytest.raises(RuntimeError, match="broke off"):
        net._check_reducer_finalized()
    net.zero_grad()
    net(batch()).sum().backward()
    net._check_reducer_finalized()


# Options that are set late


@ranks(2)
def test_a_static_graph_is_set_before_training_and_once() -> None:
    net = DistributedDataParallel(Two(), find_unused_parameters=False)
    net._set_static_graph()
    assert net.static_graph
    for _ in range(3):  # would raise in strict mode
        net(batch(), both=False).sum().backward()
    with pytest.warns(UserWarning, match="no need to set it again"):
        net._set_static_graph()
    late = DistributedDataParallel(Two(), find_unused_parameters=False)
    late(batch())
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


# The reducer


@pytest.mark.parametrize("when", ["before", "after a step", "between"])
@ranks(2)
def test_without_its_hooks_a_wrapper_leaves_gradients_alone(when: str) -> None:
    net = DistributedDataParallel(Two())
    if when != "before":
        net(batch()).sum().backward()
        net.zero_grad()
    x = batch()
    output = net(x)
    if when != "between":
        net._remove_autograd_hooks()
        output = net(x)
    else:
        net._remove_autograd_hooks()
    output.sum().backward()
    own = [param.grad.clone() for param in net.parameters()]
    net.zero_grad()
    net.module(x).sum().backward()
    for param, grad in zip(net.parameters(), own, strict=True):
        assert_same_bits(param.grad, grad)
    again = DistributedDataParallel(net.module)
    again.zero_grad()
    again(x).sum().backward()
    assert_same_on_all_ranks([param.grad for param in net.parameters()])
    assert any(not torch.equal(p.grad, g) for p, g in zip(net.parameters(), own, strict=True))


@ranks(2)
def test_hooks_are_removed_in_the_middle_of_a_backward() -> None:
    net = DistributedDataParallel(Two())
    net(batch()).sum().backward()
    net.zero_grad()
    handle = net.module.second.bias.register_hook(lambda _: net._remove_autograd_hooks())
    net(batch()).sum().backward()
    handle.remove()
    with pytest.raises(AssertionError):
        assert_same_on_all_ranks([param.grad for param in net.parameters()])


@ranks(2)
def test_buckets_count_as_rebuilt_once_their_order_is_known() -> None:
    """ZeRO's hooks do nothing until then."""
    net = DistributedDataParallel(Two())
    assert not net._has_rebuilt_buckets
    with net.no_sync():
        net(batch()).sum().backward()
    assert not net._has_rebuilt_buckets
    net(batch()).sum().backward()
    assert net._has_rebuilt_buckets
    for name in ("_push_all_rebuilt_params", "_delay_all_reduce"):
        getattr(net.reducer, name)()
    assert net.reducer._rebuild_buckets() is False
    net._set_sparse_metadata({"first.weight": torch.arange(3)})
    net._set_ddp_sink_clone(False)
    output = net(batch())
    output.mul_(2).sum().backward()
    assert_same_on_all_ranks([param.grad for param in net.parameters()])
