"""``Tensor.grad_dtype``: gradients of another dtype than their parameters."""

import copy

import pytest
import torch
import torch.distributed as dist
from distributed import ranks
from modules import Layers
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as Stock
from training import (
    assert_close,
    assert_gradients_alike,
    drawn,
    gradients,
    means,
    train_step,
    ways,
    wrap,
)
from versions import needs_grad_dtype

from tritonddp import DistributedDataParallel
from tritonddp.buckets.assignment import BucketCaps, assign_buckets

pytestmark = needs_grad_dtype
WIDTH = 64
WIDE = ("layers.a.weight", "layers.b.weight", "layers.b.bias", "layers.c.bias")
WAYS = ways("copies", "views", "process group", "bf16 views", "int8")


def low(module: nn.Module, *names: str) -> nn.Module:
    """A copy in bf16, in which gradients of the parameters with these names are fp32."""
    module = copy.deepcopy(module).bfloat16()
    for name in names:
        module.get_parameter(name).grad_dtype = torch.float32
    return module


def inputs(step: int) -> Tensor:
    return drawn(5, WIDTH, step=step).bfloat16()


def test_gradients_of_one_dtype_share_a_bucket_and_their_bytes_count() -> None:
    other, wide = (nn.Parameter(torch.empty(10, dtype=torch.bfloat16)) for _ in range(2))
    wide.grad_dtype = torch.float32
    params = [other, wide, nn.Parameter(torch.empty(10)), other]
    assert assign_buckets(params, range(4), BucketCaps((80,))) == [[1, 2], [0, 3]]
    assert assign_buckets(params, range(4), BucketCaps((40,))) == [[1], [2], [0, 3]]
    other.grad_dtype = None  # any dtype: the dtype of the parameter is expected
    assert assign_buckets(params, range(4), BucketCaps((80,))) == [[1, 2], [0, 3]]


@pytest.mark.parametrize("way", WAYS)
@ranks(2, 3)
def test_means_have_the_dtype_and_its_digits(way: str) -> None:
    """One rank leaves out a layer in the last step."""
    module = Layers("abc", WIDTH)
    alone = low(module, *WIDE)
    ddp = DistributedDataParallel(low(module, *WIDE), **WAYS[way])
    is_rounded = way in ("bf16 views", "int8")
    for step in range(3):
        used = "ac" if step == 2 and dist.get_rank() == 0 else "abc"
        for net in (ddp, alone):
            train_step(net, inputs(step), used)
        expected = means(None if grad is None else grad.float() for grad in gradients(alone))
        for (name, param), mean in zip(ddp.module.named_parameters(), expected, strict=True):
            assert param.grad.dtype is (torch.float32 if name in WIDE else torch.bfloat16), name
            digits = 1e-6 if name in WIDE and not is_rounded else 0.02
            within = digits * float(mean.abs().max())
            assert_close(param.grad.float(), mean, f"step {step}, {name}", rtol=0, atol=within)
        assert_gradients_alike(ddp)
    sent = {bucket.wire_dtype for bucket in ddp.reducer.buckets}
    assert is_rounded or sent == {torch.bfloat16, torch.float32}


@pytest.mark.parametrize("moment", ["before", "after"])
@ranks(2, views=True)
def test_a_change_after_wrapping_is_an_error_that_names_the_parameter(
    moment: str, view: bool
) -> None:
    """When torch refuses a view, or when new buckets might differ between ranks."""
    ddp = wrap(low(Layers("abc", WIDTH)), view)
    if moment == "after":
        train_step(ddp, inputs(0))
        ddp.zero_grad()
    ddp.module.layers["a"].weight.grad_dtype = torch.float32
    error = r"rank \d, step \d+: the gradient dtype of .*'layers.a.weight'.* [Ww]rap the module"
    with pytest.raises(RuntimeError, match=error):  # noqa: PT012
        for step in range(10):
            train_step(ddp, inputs(step))
            ddp.module.layers["c"].weight.requires_grad_(False)


@ranks(2)
def test_stock_refuses_it() -> None:
    net = Stock(low(Layers("abc", WIDTH), *WIDE))
    with pytest.raises(RuntimeError, match="Expected BFloat16, got Float"):
        train_step(net, inputs(0))


@ranks(2)
def test_ranks_with_another_grad_dtype_are_named(rank: int) -> None:
    with pytest.raises(RuntimeError, match=r"'layers.a.weight': .*rank 1 .*grad_dtype.*float32"):
        wrap(low(Layers("abc", WIDTH), *["layers.a.weight"] * rank))


@ranks(2)
def test_gradients_of_a_dtype_without_kernels_are_refused() -> None:
    module = nn.Linear(4, 4)
    module.weight.grad_dtype = torch.float8_e4m3fn
    with pytest.raises(NotImplementedError, match=r"'weight' has gradients of .*float8"):
        wrap(module)
