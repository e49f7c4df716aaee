"""Wrapping a model: accepted and refused models and options, and the texts of errors."""

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
from modules import Layers, normed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel as Stock
from torch.nn.parallel.distributed import _MixedPrecision
from training import delayed, unwarned

import tritonddp
from tritonddp import DistributedDataParallel, Int8
from tritonddp.coordination import verify


def small() -> nn.Sequential:
    return normed(3, 2)


def changed(change: Callable[[nn.Sequential], object]) -> nn.Module:
    model = small()
    change(model)
    return model


def with_buffer(make: Callable[[], torch.Tensor]) -> nn.Module:
    return changed(lambda model: model.register_buffer("buffer", make()))


def lazy() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))


def on_meta() -> nn.Module:
    return nn.Linear(2, 2, device="meta")


def assert_works() -> None:
    """Wrap and train a model in the default group. The ranks must match."""
    ddp = DistributedDataParallel(small())
    for _ in range(2):
        ddp(torch.randn(4, 3) + dist.get_rank()).pow(2).sum().backward()
        assert_same_on_all_ranks([*ddp.parameters(), *(p.grad for p in ddp.parameters())])


def assert_text(caught: Any, parts: str) -> None:
    """The message contains all parts, which are separated by semicolons."""
    for part in parts.split("; "):
        assert part in str(caught.value), f"{part!r} is not in: {caught.value}"


def test_the_signature_is_that_of_torch() -> None:
    theirs = inspect.signature(Stock.__init__).parameters
    ours = inspect.signature(DistributedDataParallel.__init__).parameters
    # torch 2.11, 2.13 and 2.15 have added these, at the end.
    later = "bucket_cap_mb_list batched_grad_copy forward_sync_buffers lazy_bucket_allocation"
    added = [name for name in later.split() if name not in theirs]
    by_name = [name for name, each in ours.items() if each.kind is inspect.Parameter.KEYWORD_ONLY]
    assert [*theirs, *added, *by_name] == list(ours), "torch's names and order"
    for name, parameter in theirs.items():
        assert ours[name].kind is parameter.kind, name
        # Unused parameters are detected. For buffers, None is stock's default from torch 2.13 on.
        ours_is_none = name in ("find_unused_parameters", "broadcast_buffers")
        default = None if ours_is_none else parameter.default
        assert ours[name].default == default, name


# Refused models and options

MODELS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "not a module": (object, TypeError, "torch.nn.Module; object"),
    "frozen": (
        lambda: small().requires_grad_(False),
        RuntimeError,
        "requires a gradient; Sequential",
    ),
    "lazy": (lazy, RuntimeError, "uninitialized; 1.weight, 1.bias; dummy forward"),
    "complex": (
        lambda: nn.ParameterDict({"weight": torch.zeros(2, dtype=torch.complex32)}),
        NotImplementedError,
        "'weight'; torch.complex32",
    ),
    "two devices": (
        lambda: nn.Sequential(nn.Linear(2, 2), on_meta()),
        ValueError,
        "'cpu': '0.weight'; 'meta': '1.weight'",
    ),
    "device without kernels": (on_meta, RuntimeError, "'meta'; 'cpu'; move the module"),
    "sync batch norm": (
        lambda: nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)),
        ValueError,
        "SyncBatchNorm; '1'; CPU",
    ),
    "sharded": (
        lambda: changed(lambda m: fully_shard(m[0], mesh=init_device_mesh("cpu", (2,)))),
        NotImplementedError,
        "weight' is a DTensor; FSDP2; _to_ignore",
    ),
}
BUFFERS: dict[str, Callable[[], torch.Tensor]] = {
    "sparse_coo": lambda: torch.eye(2).to_sparse(),
    "expanded": lambda: torch.zeros(1).expand(3),
    "uninitialized": nn.UninitializedBuffer,
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "DTensor": lambda: distribute_tensor(torch.ones(2), init_device_mesh("cpu", (2,))),
}
for kind, make in BUFFERS.items():
    MODELS[kind] = (partial(with_buffer, make), NotImplementedError, f"'buffer' is; {kind}")

PARAM = nn.Parameter(torch.ones(1))
DELAYED, UNTIL = "delay_all_reduce_named_params", "param_to_hook_all_reduce"
TOGETHER = "need to be set at the same time"
DIVIDED = "positive and finite, got "
WRONG_VALUES: list[tuple[str, dict[str, Any]]] = [
    (
        "does not belong to process_group; only on the ranks of the group",
        {"process_group": dist.GroupMember.NON_GROUP_MEMBER},
    ),
    ("device_ids [0]; cpu; omit both arguments", {"device_ids": [0]}),
    ("single element; [0, 1]", {"device_ids": [0, 1]}),
    ("output_device 1", {"output_device": 1}),
    ("finite and not negative, got -1 MiB", {"bucket_cap_mb": -1}),
    ("bucket_cap_mb_list; empty", {"bucket_cap_mb_list": []}),
    ("bucket_cap_mb_list; -2", {"bucket_cap_mb_list": [1, -2]}),
    (f"{DELAYED}; {TOGETHER}", {DELAYED: [("a", PARAM)]}),
    (f"{UNTIL}; {TOGETHER}", {UNTIL: PARAM}),
    ("not belong to the wrapped module: 'a'", {DELAYED: [("a", PARAM)], UNTIL: PARAM}),
    ("torch.int8; reduce_dtype", {"mixed_precision": _MixedPrecision(reduce_dtype=torch.int8)}),
    (
        "torch.bfloat16, torch.float16, torch.float32; torch.int8",
        {"reduce_dtype": torch.int8},
    ),
    (
        "should be 'int8', 'int4', a tritonddp.Int8, a tritonddp.Int4 or None, got 'int3'",
        {"compression": "int3"},
    ),
    ("matches 'wheight'", {"compression": Int8(exact="wheight")}),
    ("check_finite should be 'raise', 'warn' or None, got 'log'", {"check_finite": "log"}),
    (f"{DIVIDED}0", {"gradient_divide_factor": 0}),
    (f"{DIVIDED}1000", {"gradient_divide_factor": 10**400}),
    (f"{DIVIDED}1e-320", {"gradient_divide_factor": 1e-320}),
]
WRONG_TYPES: list[tuple[str, dict[str, Any]]] = [
    ("device_ids; got 0", {"device_ids": 0}),
    ("bucket_cap_mb; '25'", {"bucket_cap_mb": "25"}),
    ("bucket_cap_mb; tensor([1, 2])", {"bucket_cap_mb": torch.tensor([1, 2])}),
    ("bucket_cap_mb_list; 5", {"bucket_cap_mb_list": 5}),
    ("device_mesh; 'dp'", {"device_mesh": "dp"}),
    ("list of names and parameters", {DELAYED: [torch.ones(1)], UNTIL: 1}),
    (f"{UNTIL}; got 1", {DELAYED: [], UNTIL: 1}),
    ("mixed_precision; _MixedPrecision", {"mixed_precision": object()}),
    ("reduce_dtype; 'bf16'", {"reduce_dtype": "bf16"}),
    (
        "'find_unused_parameter': did you mean 'find_unused_parameters'?",
        {"find_unused_parameter": True},
    ),
    ("unexpected keyword argument 'nbytes'", {"nbytes": 3}),
    ("None or a number, got True", {"gradient_divide_factor": True}),
    ("metrics", {"metrics": "yes"}),
]
EXCLUSIVE = {"process_group": object(), "device_mesh": object()}


@ranks(2)
def test_a_refused_model_or_option_is_named_and_the_next_wrapper_works() -> None:
    cases: list[Any] = [(*case, {}) for case in MODELS.values()]
    cases += [(small, ValueError, *case) for case in WRONG_VALUES]
    cases += [(small, TypeError, *case) for case in WRONG_TYPES]
    cases += [(small, RuntimeError, "process_group and device_mesh", EXCLUSIVE)]
    for make, error, parts, options in cases:
        with pytest.raises(error) as caught:
            DistributedDataParallel(make(), **options)
        assert_text(caught, parts)
        assert type(caught.value) is error, parts
        assert_works()


@ranks(2)
def test_a_buffer_that_cannot_be_synchronized_is_named_by_the_forward() -> None:
    for kind, make in BUFFERS.items():
        ddp = DistributedDataParallel(with_buffer(make), init_sync=False)
        with pytest.raises(NotImplementedError, match=f"'buffer' is .*{kind}"):
            ddp(torch.randn(4, 3))
    empty = with_buffer(lambda: torch.zeros(1, 0).expand(3, 0))
    DistributedDataParallel(empty)(torch.randn(4, 3)).sum().backward()
    assert_works()


@ranks(3)
def test_a_module_that_one_rank_cannot_wrap_is_an_error_on_every_rank(rank: int) -> None:
    for case in ("frozen", "lazy", "complex", "sparse_coo", "sync batch norm"):
        make, _, parts = MODELS[case]
        with pytest.raises(RuntimeError) as caught:
            DistributedDataParallel(make() if rank == 1 else small())
        assert_text(caught, "rank 1; " + parts)
        assert_works()


@ranks(2)
def test_if_no_rank_can_wrap_its_module_each_rank_raises_its_own_error(rank: int) -> None:
    """``device_ids`` with a model on the CPU. In a group for GPUs, ranks cannot exchange errors."""
    for group in (None, dist.new_group(backend="cuda:gloo")):
        with pytest.raises(ValueError, match=rf"device_ids \[{rank}\], output_device None"):
            DistributedDataParallel(small(), device_ids=[rank], process_group=group)
        assert_works()


def test_without_a_process_group_the_error_names_the_call() -> None:
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match=r"Default process group .*init_process_group\('gloo'\)"):
        DistributedDataParallel(small())


# Ranks that differ


def reorder(model: nn.Sequential) -> None:
    model[0]._parameters["weight"] = model[0]._parameters.pop("weight")


def transpose(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(torch.randn(3, 2).t())


# The model of rank 2, and what the error names.
DIFFERENT: list[tuple[Callable[[], nn.Module], str]] = [
    (
        lambda: nn.ModuleDict({"first": nn.Linear(3, 2), "second": nn.BatchNorm1d(2)}),
        "'0.weight'; 'first.weight'; none with this name",
    ),
    (lambda: normed(4, 2), "'0.weight'; (2, 3); (2, 4)"),
    (lambda: normed(2, 3), "'0.weight'; (2, 3); (3, 2)"),
    (
        lambda: changed(lambda model: model[0].bfloat16()),
        "'0.weight'; torch.float32; torch.bfloat16",
    ),
    (lambda: changed(transpose), "'0.weight'; strides (3, 1); strides (1, 2)"),
    (
        lambda: nn.Sequential(*small(), nn.Linear(2, 2)),
        "Rank 0 has 4 params; inconsistent 6 params; '2.weight'",
    ),
    (lambda: changed(lambda model: model[0].bias.requires_grad_(False)), "'0.bias'; frozen"),
    (lambda: with_buffer(lambda: torch.ones(3)), "buffer 'buffer'; none with this name; (3,)"),
    (lambda: changed(reorder), "different order"),
]


@ranks(3)
def test_models_that_differ_are_named_on_every_rank_and_nothing_is_left_half_done(
    rank: int,
) -> None:
    for make, parts in DIFFERENT:
        model = make() if rank == 2 else small()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(RuntimeError) as caught:
            DistributedDataParallel(model)
        assert_text(caught, "same model across all ranks; rank 2; on every rank; " + parts)
        assert len({*gather(str(caught.value))}) == 1, "every rank gets the same message"
        assert_same_bits(model.state_dict(), before, parts)
        assert_works()


@ranks(2)
def test_options_that_differ_between_ranks_are_named(rank: int) -> None:
    bf16, fp16 = torch.bfloat16, torch.float16
    cases: list[tuple[str, str, list[Any]]] = [
        ("compression", "compression", [None, "int8"]),
        ("exact", "compression", [Int8(), Int8(exact="0.weight")]),
        ("'reduce_dtype': rank 0 has torch.bfloat16, rank 1", "reduce_dtype", [bf16, fp16]),
        ("mixed_precision.*float16", "mixed_precision", list(map(_MixedPrecision, (fp16, bf16)))),
        ("forward_sync_buffers", "forward_sync_buffers", [None, False]),
        ("metrics", "metrics", [True, False]),
        (rf"option 'bucket sizes': .*{7 * 2**20}", "bucket_cap_mb", [25, 7]),
    ]
    for text, option, values in cases:
        with pytest.raises(RuntimeError, match=text):
            DistributedDataParallel(normed(64, 64), **{option: values[rank]})
        assert_works()
    # These may differ.
    options = {"find_unused_parameters": False, "gradient_as_bucket_view": True}
    DistributedDataParallel(small(), **options if rank else {})


@ranks(2)
def test_delayed_parameters_that_differ_between_ranks_are_an_error(rank: int) -> None:
    module = Layers("abc")
    options = delayed(module, f"layers.{'bc'[rank]}.bias", until=module.layers["a"].weight)
    with pytest.raises(RuntimeError, match="delayed"):
        DistributedDataParallel(module, **options)


@ranks(2)
def test_a_description_larger_than_possible_is_an_error(rank: int) -> None:
    module = nn.Linear(2, 2) if rank else nn.Linear(2, 3)
    with (
        mock.patch.object(verify, "_LARGEST", 10),
        pytest.raises(RuntimeError, match=r"the description of a rank is too long: \d+ bytes"),
    ):
        DistributedDataParallel(module)


@ranks(2)
def test_a_buffer_may_have_another_memory_order_on_each_rank(rank: int) -> None:
    """As in stock DDP, which sends its values."""
    table = torch.arange(6.0).view(3, 2) + 10 * rank
    model = with_buffer(lambda: table.t().contiguous().t() if rank else table)
    ddp = DistributedDataParallel(model)
    for step in range(3):
        with torch.no_grad():
            model.buffer += 10 * rank
        ddp(torch.ones(4, 3)).sum().backward()
        assert torch.equal(model.buffer, torch.arange(6.0).view(3, 2)), f"step {step}"


# Accepted arguments


@ranks(2)
def test_arguments_without_effect_are_accepted() -> None:
    for make in (DistributedDataParallel, tritonddp.replicate):
        with pytest.warns(FutureWarning, match="check_reduction") as caught:
            make(small(), check_reduction=True, bucket_cap_mb=torch.tensor(1))
        assert [each.filename for each in caught] == [__file__]
    with pytest.warns(FutureWarning, match="forward_sync_buffers"):
        DistributedDataParallel(small(), broadcast_buffers=True)
    with unwarned():
        ddp = DistributedDataParallel(
            small(), None, None, 1, static_graph=True, batched_grad_copy=True
        )
    ddp(torch.randn(4, 3)).sum().backward()
    # As in stock, output_device 0 has no effect on the CPU.
    assert DistributedDataParallel(small(), output_device=0).output_device is None


# Two wrappers of one parameter


@ranks(2)
def test_a_wrapper_in_a_wrapper_cannot_share_gradients_by_view() -> None:
    inner = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="already wrapped"):
        DistributedDataParallel(nn.Sequential(inner), gradient_as_bucket_view=True)
    with pytest.warns(UserWarning, match="'0' is already wrapped.*averaged twice") as caught:
        DistributedDataParallel(nn.Sequential(inner))
    assert [each.filename for each in caught] == [__file__]
    other = dist.new_group()  # for example across hosts, if the inner one is within a host
    with unwarned():
        DistributedDataParallel(nn.Sequential(inner), process_group=other)


@ranks(2)
def test_wrappers_that_share_a_parameter_cannot_both_own_its_gradient() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    both = [DistributedDataParallel(first, gradient_as_bucket_view=True)]
    both += [DistributedDataParallel(second)]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"step \d+: two wrapped modules .* 'weight'"):
            sum(each(torch.ones(1, 2)).sum() for each in both).backward()
        first.zero_grad()
    both = [DistributedDataParallel(each) for each in (first, second)]
    for _ in range(3):
        sum(each(torch.ones(1, 2)).sum() for each in both).backward()
        torch.testing.assert_close(first.weight.grad, torch.full((2, 2), 2.0))
        first.zero_grad()
