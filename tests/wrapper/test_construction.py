"""Wrapping a model: what is accepted, what is refused, and what an error says."""

import copy
import inspect
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, assert_same_on_all_ranks, gather, ranks
from modules import normed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel as Stock
from torch.nn.parallel.distributed import _MixedPrecision

import tritonddp
from tritonddp import DistributedDataParallel, Int8
from tritonddp.coordination import verify


def small() -> nn.Sequential:
    return normed(3, 2)


def assert_works(model: nn.Module | None = None) -> None:
    """A model can be wrapped and trained with the default group: nothing is out of step."""
    ddp = DistributedDataParallel(model or small())
    for _ in range(2):
        ddp(torch.randn(4, 3) + dist.get_rank()).pow(2).sum().backward()
        assert_same_on_all_ranks([*ddp.parameters(), *(p.grad for p in ddp.parameters())])


# The signature


def test_signature_is_that_of_torch() -> None:
    theirs = inspect.signature(Stock.__init__).parameters
    ours = inspect.signature(DistributedDataParallel.__init__).parameters
    assert [name for name in ours if name in theirs] == list(theirs), "torch's names and order"
    # torch 2.11, 2.13 and 2.15 have added these, at the end.
    added = [
        "bucket_cap_mb_list",
        "batched_grad_copy",
        "forward_sync_buffers",
        "lazy_bucket_allocation",
    ]
    by_name = [name for name, each in ours.items() if each.kind is inspect.Parameter.KEYWORD_ONLY]
    added = [*(name for name in added if name not in theirs), *by_name]
    assert [*theirs, *added] == list(ours)
    assert not {*by_name} & {*theirs}, "what stock lacks, and nothing else, goes by name only"
    for name, parameter in theirs.items():
        assert ours[name].kind is parameter.kind, name
        # Automatic detection instead of stock's strict mode: that is the point. And None means
        # what True meant until torch 2.13.
        ours_is_none = name in ("find_unused_parameters", "broadcast_buffers")
        default = None if ours_is_none else parameter.default
        assert ours[name].default == default, name


# What is refused, before anything is sent


def lazy() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))


def complex_weights() -> nn.Module:
    return nn.ParameterDict({"weight": nn.Parameter(torch.zeros(2, dtype=torch.complex32))})


def with_buffer(make: Callable[[], torch.Tensor]) -> nn.Module:
    model = small()
    model.register_buffer("buffer", make())
    return model


def sharded() -> nn.Module:
    model = small()
    fully_shard(model[0], mesh=init_device_mesh("cpu", (2,)))
    return model


def sync_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))


def on_meta() -> nn.Module:
    return nn.Linear(2, 2, device="meta")


class NoModule:
    pass


PARAM = nn.Parameter(torch.ones(1))
REFUSED: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "no module": (NoModule, {}, TypeError, "torch.nn.Module; NoModule"),
    "nothing to train": (
        lambda: small().requires_grad_(False),
        {},
        RuntimeError,
        "requires a gradient; Sequential",
    ),
    "no parameters": (nn.ReLU, {}, RuntimeError, "requires a gradient; ReLU"),
    "lazy": (lazy, {}, RuntimeError, "uninitialized; 1.weight, 1.bias; dummy forward"),
    "complex": (complex_weights, {}, NotImplementedError, "'weight'; torch.complex32"),
    "two kinds of devices": (
        lambda: nn.Sequential(nn.Linear(2, 2), on_meta()),
        {},
        ValueError,
        "'cpu': '0.weight'; 'meta': '1.weight'",
    ),
    "device without kernels": (on_meta, {}, RuntimeError, "'meta'; 'cpu'; move the module"),
    "sync batch norm on CPU": (sync_batch_norm, {}, ValueError, "SyncBatchNorm; '1'; CPU"),
    "not in the group": (
        small,
        {"process_group": dist.GroupMember.NON_GROUP_MEMBER},
        ValueError,
        "does not belong to process_group; on the ranks of the group only",
    ),
    "group and mesh": (
        small,
        {"process_group": object(), "device_mesh": object()},
        RuntimeError,
        "process_group and device_mesh",
    ),
}
DELAYED, UNTIL = "delay_all_reduce_named_params", "param_to_hook_all_reduce"
AT_ONE_TIME = "need to be set at the same time"
# Options of a small module whose values are wrong, or whose types.
WRONG_VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "device_ids on CPU": ({"device_ids": [0]}, "device_ids [0]; cpu; leave them out"),
    "two device_ids": ({"device_ids": [0, 1]}, "single element; [0, 1]"),
    "output_device on CPU": ({"output_device": 1}, "output_device 1"),
    "negative bucket": ({"bucket_cap_mb": -1}, "bucket_cap_mb; -1"),
    "nan bucket": ({"bucket_cap_mb": float("nan")}, "finite; nan"),
    "infinite bucket": ({"bucket_cap_mb": float("inf")}, "finite; inf"),
    "no list": ({"bucket_cap_mb_list": []}, "bucket_cap_mb_list; empty"),
    "bad list": ({"bucket_cap_mb_list": [1, -2]}, "bucket_cap_mb_list; -2"),
    "delayed": ({DELAYED: [("a", PARAM)]}, DELAYED + "; " + AT_ONE_TIME),
    "param hook": ({UNTIL: PARAM}, UNTIL + "; " + AT_ONE_TIME),
    "delayed strangers": (
        {DELAYED: [("a", PARAM)], UNTIL: PARAM},
        "none of the wrapped module's: 'a'",
    ),
    "mixed precision of integers": (
        {"mixed_precision": _MixedPrecision(reduce_dtype=torch.int8)},
        "torch.int8; reduce_dtype",
    ),
    "reduce_dtype of integers": (
        {"reduce_dtype": torch.int8},
        "torch.bfloat16, torch.float16, torch.float32; torch.int8",
    ),
    "compression": (
        {"compression": "int3"},
        "should be 'int8', 'int4', a tritonddp.Int8, a tritonddp.Int4 or None, got 'int3'",
    ),
    "exact, by another name": ({"compression": Int8(exact="wheight")}, "no parameter 'wheight'"),
    "divided by nothing": ({"gradient_divide_factor": 0}, "positive and finite, got 0"),
    "divided by less": ({"gradient_divide_factor": -2.0}, "positive and finite, got -2.0"),
    "divided by nan": ({"gradient_divide_factor": float("nan")}, "positive and finite, got nan"),
    "divided by too much": ({"gradient_divide_factor": 10**400}, "positive and finite, got 1000"),
    "divided by too little": (
        {"gradient_divide_factor": 1e-320},
        "positive and finite, got 1e-320",
    ),
}
WRONG_TYPES: dict[str, tuple[dict[str, Any], str]] = {
    "device_ids of another kind": ({"device_ids": 0}, "device_ids; got 0"),
    "bucket in words": ({"bucket_cap_mb": "25"}, "bucket_cap_mb; '25'"),
    "bucket of truth": ({"bucket_cap_mb": True}, "bucket_cap_mb; True"),
    "two buckets": ({"bucket_cap_mb": torch.tensor([1, 2])}, "bucket_cap_mb; tensor([1, 2])"),
    "no list at all": ({"bucket_cap_mb_list": 5}, "bucket_cap_mb_list; 5"),
    "no mesh": ({"device_mesh": "dp"}, "device_mesh; 'dp'"),
    "delayed without names": ({DELAYED: [torch.ones(1)], UNTIL: 1}, "list of names and parameters"),
    "delayed until nothing": ({DELAYED: [], UNTIL: 1}, UNTIL + "; " + "got 1"),
    "mixed precision": ({"mixed_precision": object()}, "mixed_precision; _MixedPrecision"),
    "reduce_dtype by name": ({"reduce_dtype": "bf16"}, "reduce_dtype; 'bf16'"),
    "misspelt": (
        {"find_unused_parameter": True},
        "'find_unused_parameter': did you mean 'find_unused_parameters'?",
    ),
    "like no option": ({"nbytes": 3}, "unexpected keyword argument 'nbytes'"),
    "divided by truth": ({"gradient_divide_factor": True}, "None or a number, got True"),
    "divided by a word": ({"gradient_divide_factor": "mean"}, "None or a number, got 'mean'"),
    "metrics": ({"metrics": "yes"}, "metrics"),
}
for kind, wrong in ((ValueError, WRONG_VALUES), (TypeError, WRONG_TYPES)):
    REFUSED |= {name: (small, options, kind, said) for name, (options, said) in wrong.items()}


READ_ONLY = {
    "sparse_coo": lambda: torch.eye(2).to_sparse(),
    "expanded": lambda: torch.zeros(1).expand(3),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "uninitialized": nn.UninitializedBuffer,
    "DTensor": lambda: distribute_tensor(torch.ones(2), init_device_mesh("cpu", (2,))),
}
REFUSED["sharded"] = (sharded, {}, NotImplementedError, "weight' is a DTensor; FSDP2; _to_ignore")
for kind, make in READ_ONLY.items():
    REFUSED[kind] = (partial(with_buffer, make), {}, NotImplementedError, f"'buffer' is; {kind}")


def assert_says(caught: Any, case: str, parts: str) -> None:
    for part in parts.split("; "):
        assert part in str(caught.value), f"{case}: {part!r} is not in: {caught.value}"


@ranks(2)
def test_refused_with_the_reason_and_nothing_left_half_done() -> None:
    for case, (make, options, error, parts) in REFUSED.items():
        with pytest.raises(error) as caught:
            DistributedDataParallel(make(), **options)
        assert_says(caught, case, parts)
        assert type(caught.value) is error, case
        assert_works()


@ranks(2)
def test_a_buffer_that_cannot_be_synchronized_is_named_before_the_forward_too() -> None:
    for kind, make in READ_ONLY.items():
        ddp = DistributedDataParallel(with_buffer(make), init_sync=False)
        with pytest.raises(NotImplementedError, match=f"'buffer' is .*{kind}"):
            ddp(torch.randn(4, 3))
    empty = with_buffer(lambda: torch.zeros(1, 0).expand(3, 0))
    DistributedDataParallel(empty)(torch.randn(4, 3)).sum().backward()
    assert_works()


@ranks(3)
def test_a_module_that_one_rank_cannot_wrap_is_an_error_on_every_rank(rank: int) -> None:
    for case in ("nothing to train", "lazy", "complex", "sparse_coo", "sync batch norm on CPU"):
        make, _, _, parts = REFUSED[case]
        model = make() if rank == 1 else small()
        with pytest.raises(RuntimeError) as caught:
            DistributedDataParallel(model)
        assert_says(caught, case, "rank 1; " + parts)
        assert_works()


@ranks(2)
def test_where_no_rank_can_wrap_its_module_each_raises_its_own_error(rank: int) -> None:
    """The commonest mistake: ``device_ids`` with the model still on the CPU."""
    with pytest.raises(ValueError, match=rf"device_ids \[{rank}\], output_device None"):
        DistributedDataParallel(small(), device_ids=[rank])
    assert_works()


@ranks(2)
def test_where_a_failure_cannot_be_told_each_rank_raises_its_own_error(rank: int) -> None:
    """A module on the CPU in a group for GPUs."""
    group = dist.new_group(backend="cuda:gloo")
    with pytest.raises(ValueError, match=r"device_ids .* only work with"):
        DistributedDataParallel(small(), device_ids=[rank], process_group=group)
    assert_works()


@ranks(2)
def test_output_device_0_on_the_cpu_is_ignored_as_in_stock() -> None:
    assert DistributedDataParallel(small(), output_device=0).output_device is None
    assert_works()


def test_without_a_process_group_the_error_says_what_to_call() -> None:
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match=r"Default process group .*init_process_group\('gloo'\)"):
        DistributedDataParallel(small())


# Models that differ


def changed(change: Callable[[nn.Sequential], object]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = small()
        change(model)
        return model

    return make


def one_more() -> nn.Sequential:
    return nn.Sequential(*small(), nn.Linear(2, 2))


def other_order(model: nn.Sequential) -> None:
    model[0]._parameters["weight"] = model[0]._parameters.pop("weight")


DIFFERENT: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "name": (
        lambda: nn.ModuleDict({"first": nn.Linear(3, 2), "second": nn.BatchNorm1d(2)}),
        {},
        "'0.weight'; 'first.weight'; none of this name",
    ),
    "shape": (lambda: normed(4, 2), {}, "'0.weight'; (2, 3); (2, 4)"),
    "shape of one size": (lambda: normed(2, 3), {}, "'0.weight'; (2, 3); (3, 2)"),
    "dtype": (
        changed(lambda model: model[0].bfloat16()),
        {},
        "'0.weight'; torch.float32; torch.bfloat16",
    ),
    "strides": (
        changed(lambda m: setattr(m[0], "weight", nn.Parameter(torch.randn(3, 2).t()))),
        {},
        "'0.weight'; strides (3, 1); strides (1, 2)",
    ),
    "number": (one_more, {}, "Rank 0 has 4 params; inconsistent 6 params; '2.weight'"),
    "frozen": (changed(lambda model: model[0].bias.requires_grad_(False)), {}, "'0.bias'; frozen"),
    "buffer": (
        changed(lambda model: model.register_buffer("extra", torch.ones(3))),
        {},
        "buffer 'extra'; none of this name; (3,)",
    ),
    "order": (changed(other_order), {}, "another order"),
    "bucket_cap_mb": (small, {"bucket_cap_mb": 7}, "option 'bucket sizes'" + "; " + str(7 * 2**20)),
    "find_unused": (small, {"find_unused_parameters": False}, ""),
    # Each rank may do as it likes: what travels is the same.
    "views": (small, {"gradient_as_bucket_view": True}, ""),
}


@ranks(2)
def test_a_buffer_may_have_another_memory_order_on_each_rank(rank: int) -> None:
    """As under stock, which sends its values."""
    model = small()
    table = torch.arange(6.0).view(3, 2) + 10 * rank
    model.register_buffer("table", table.t().contiguous().t() if rank else table)
    ddp = DistributedDataParallel(model)
    for step in range(3):
        with torch.no_grad():
            model.table += 10 * rank
        ddp(torch.ones(4, 3)).sum().backward()
        assert torch.equal(model.table, torch.arange(6.0).view(3, 2)), f"step {step}"


# Options that differ: of rank 0 and of rank 1, and the one that the error names.
UNLIKE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "compression": ({}, {"compression": "int8"}, "compression"),
    "feedback": (
        {"compression": Int8(error_feedback=False)},
        {"compression": "int8"},
        "error_feedback",
    ),
    "exact": ({"compression": Int8()}, {"compression": Int8(exact="0.weight")}, "exact"),
    "reduce_dtype": (
        {"reduce_dtype": torch.bfloat16},
        {"reduce_dtype": torch.float16},
        r"'reduce_dtype': rank 0 has torch.bfloat16, rank 1",
    ),
    "no reduce_dtype": (
        {"reduce_dtype": None},
        {"reduce_dtype": torch.float16},
        r"'reduce_dtype': rank 0 has none",
    ),
    "mixed precision": (
        {"mixed_precision": _MixedPrecision(torch.float16)},
        {"mixed_precision": _MixedPrecision(torch.bfloat16)},
        r"mixed_precision.*float16",
    ),
    "buffers": ({}, {"forward_sync_buffers": False}, "forward_sync_buffers"),
    "metrics": ({"metrics": True}, {"metrics": False}, "metrics"),
}


@ranks(3)
def test_models_that_differ_are_named_on_every_rank_and_nothing_is_left_half_done(
    rank: int,
) -> None:
    odd = rank == 2
    for case, (make, options, parts) in DIFFERENT.items():
        model = make() if odd else small()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        given = options if odd else {}
        if not parts:
            DistributedDataParallel(model, **given)
        else:
            with pytest.raises(RuntimeError) as caught:
                DistributedDataParallel(model, **given)
            said = "same model across all ranks; rank 2; on every rank; " + parts
            assert_says(caught, case, said)
            assert len({*gather(str(caught.value))}) == 1, "every rank gets the same message"
            assert_same_bits(model.state_dict(), before, case)
        assert_works()


@ranks(2)
def test_options_that_differ_between_ranks_are_named(rank: int) -> None:
    for *options, named in UNLIKE.values():
        with pytest.raises(RuntimeError, match=named):
            DistributedDataParallel(normed(64, 64), **options[rank])
        assert_works()


@ranks(2)
def test_a_thousand_differences_make_a_short_message(rank: int) -> None:
    model = nn.ModuleList(nn.Linear(2, 2 + rank) for _ in range(500))
    with pytest.raises(RuntimeError) as caught:
        DistributedDataParallel(model)
    assert len(str(caught.value).splitlines()) < 15
    assert_says(caught, "500 layers", "990 more")
    assert_works()


# What is accepted


@ranks(2)
def test_it_passes_for_what_it_replaces() -> None:
    model = small()
    ddp = DistributedDataParallel(model)
    assert isinstance(ddp, Stock)
    assert ddp.module is model
    assert list(ddp.state_dict()) == [f"module.{name}" for name in model.state_dict()]
    assert list(ddp.state_dict()) == list(Stock(copy.deepcopy(model)).state_dict())
    state = {name: torch.zeros_like(value) for name, value in ddp.state_dict().items()}
    ddp.load_state_dict(state)
    assert all(not param.any() for param in model.parameters())
    assert ddp.train() is ddp
    assert model.training
    ddp.eval()
    assert not model.training
    assert not isinstance(model, Stock)


@ranks(2)
def test_arguments_without_effect_are_accepted() -> None:
    for make in (DistributedDataParallel, tritonddp.replicate):
        with pytest.warns(FutureWarning, match="check_reduction") as said:
            make(small(), check_reduction=True, bucket_cap_mb=torch.tensor(1))
        assert [each.filename for each in said] == [__file__]
    with pytest.warns(FutureWarning, match="forward_sync_buffers"):
        DistributedDataParallel(small(), broadcast_buffers=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ddp = DistributedDataParallel(
            small(), None, None, 1, static_graph=True, batched_grad_copy=True
        )
    ddp(torch.randn(4, 3)).sum().backward()


# Importing


@ranks(2)
def test_a_wrapper_within_a_wrapper_cannot_share_gradients_by_view() -> None:
    inner = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="wrapped already"):
        DistributedDataParallel(nn.Sequential(inner), gradient_as_bucket_view=True)
    with pytest.warns(UserWarning, match="'0' is wrapped already.*averaged twice") as said:
        DistributedDataParallel(nn.Sequential(inner))
    assert [each.filename for each in said] == [__file__]
    other = dist.new_group()  # across hosts, say, of means within them
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DistributedDataParallel(nn.Sequential(inner), process_group=other)


@ranks(2)
def test_wrappers_that_share_a_parameter_cannot_both_own_its_gradient() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    both = [DistributedDataParallel(first, gradient_as_bucket_view=True)]
    both += [DistributedDataParallel(second)]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"step \d+: .* hold 'weight' both"):
            sum(each(torch.ones(1, 2)).sum() for each in both).backward()
        first.zero_grad()
    both = [DistributedDataParallel(each) for each in (first, second)]
    for _ in range(3):
        sum(each(torch.ones(1, 2)).sum() for each in both).backward()
        torch.testing.assert_close(first.weight.grad, torch.full((2, 2), 2.0))
        first.zero_grad()


@ranks(2)
def test_a_rank_that_announces_more_than_there_can_be_is_not_believed(rank: int) -> None:
    module = nn.Linear(2, 2) if rank else nn.Linear(2, 3)
    with (
        mock.patch.object(verify, "_LARGEST", 10),
        pytest.raises(RuntimeError, match=r"a rank announces a description of \d+ bytes"),
    ):
        DistributedDataParallel(module)
