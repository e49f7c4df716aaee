"""Weighted means over ranks and accumulated backwards."""

import contextlib
import copy
import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, gather, ranks
from modules import OnDemand
from torch import Tensor, nn
from torch.nn import Parameter
from training import (
    assert_close,
    assert_gradients_alike,
    breaking_off,
    counted,
    gradients,
    train_step,
    wrap,
)

from tritonddp import DistributedDataParallel
from tritonddp.coordination.agreement import Weight
from tritonddp.features.weighted_mean import AccumulationWindow, weight_of
from tritonddp.reducer.graph.backward import SyncState


@pytest.mark.parametrize("n", [0, 3, 2.5, torch.tensor(4), torch.tensor([0.5])])
def test_numbers_and_tensors_of_one_element_are_weights(n: Any) -> None:
    assert weight_of(n, "mean").items == float(n)


@pytest.mark.parametrize("n", ["3", None, True, torch.ones(2), 1j])
def test_what_is_no_number_is_refused(n: Any) -> None:
    with pytest.raises(TypeError, match="number of items"):
        weight_of(n, "mean")


@pytest.mark.parametrize("n", [-1, math.nan, math.inf, 10**400, torch.tensor(-0.5)])
def test_a_weight_out_of_range_is_refused(n: Any) -> None:
    with pytest.raises(ValueError, match="finite and not negative"):
        weight_of(n, "mean")


def test_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(ValueError, match="'none'"):
        weight_of(1, "none")


# The window of one parameter


def window_of(param: Parameter) -> AccumulationWindow:
    """Of a module with this one parameter."""
    parameters: Any = SimpleNamespace(params=[("param", param)], added=[])
    manager: Any = SimpleNamespace(current=SimpleNamespace(params=[param]))
    return AccumulationWindow(parameters, SyncState(), manager)


def begin(window: AccumulationWindow, weight: float | None, **kind: bool) -> None:
    """A backward of this weight, that of a mean unless it is one of a sum."""
    last = {"is_last": False, "is_first": False, "is_late": False}
    found = None if weight is None else Weight(weight, is_sum=kind.pop("is_sum", False))
    window.open(found, **{**last, **kind})


def local_backward(
    window: AccumulationWindow, param: Parameter, weight: float, gradient: Tensor | None
) -> None:
    begin(window, weight)
    if gradient is not None:
        param.grad = gradient if param.grad is None else param.grad + gradient
    window.close([param])


def accumulate(grads: list[float | None], weights: list[float], before: float | None) -> float:
    """What one parameter's ``.grad`` is after local backwards with these gradients."""
    param = Parameter(torch.zeros(1, dtype=torch.float64))
    param.grad = None if before is None else torch.full_like(param, before)
    window = window_of(param)
    for gradient, weight in zip(grads, weights, strict=True):
        new = None if gradient is None else torch.full_like(param, gradient)
        local_backward(window, param, weight, new)
    assert window.weight == Weight(sum(weights), is_sum=False)
    return math.nan if param.grad is None else param.grad.item()


@pytest.mark.parametrize("before", [None, 10.0])
@pytest.mark.parametrize("grads", list(itertools.product([1.0, None, -4.0], repeat=3)))
def test_a_window_holds_the_weighted_mean_on_top_of_what_was_there(
    grads: Any, before: float | None
) -> None:
    weights = [2.0, 0.5, 3.0]
    found = accumulate(list(grads), weights, before)
    if before is None and all(gradient is None for gradient in grads):
        assert math.isnan(found)
        return
    mean = sum(w * (g or 0) for w, g in zip(weights, grads, strict=True)) / sum(weights)
    assert found == pytest.approx(mean + (before or 0), rel=1e-14)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_gradient_of_weight_zero_may_be_nan(place: int) -> None:
    grads, weights = [1.0, 2.0, 4.0], [1.0, 1.0, 2.0]
    grads[place], weights[place] = math.nan, 0.0
    mean = sum(w * g for w, g in zip(weights, grads, strict=True) if w) / sum(weights)
    assert accumulate(grads, weights, None) == pytest.approx(mean)


@pytest.fixture
def one_behind() -> tuple[AccumulationWindow, Parameter]:
    """A window, and its parameter, after a backward of weight 1 whose gradient is 1."""
    param = Parameter(torch.zeros(1))
    window = window_of(param)
    local_backward(window, param, 1, torch.ones(1))
    return window, param


def test_an_unweighted_backward_after_weighted_ones_is_an_error_until_they_are_dropped(
    one_behind: Any,
) -> None:
    window, param = one_behind
    with pytest.raises(RuntimeError, match="has no weight"):
        begin(window, None, is_last=True)
    param.grad = None
    begin(window, None, is_last=True)
    assert window.weight is None


def test_means_and_sums_are_not_mixed(one_behind: Any) -> None:
    with pytest.raises(RuntimeError, match="'mean' and with reduction='sum'"):
        begin(one_behind[0], 1, is_sum=True)


def test_a_broken_backward_leaves_the_window_as_it_was(one_behind: Any) -> None:
    window, param = one_behind
    mean = param.grad
    begin(window, 3)
    param.grad = torch.full((1,), 7.0)
    window.on_abort(None)
    assert param.grad is mean
    assert mean.item() == 1
    assert window.weight == Weight(1, is_sum=False)


def test_a_sparse_gradient_that_alone_has_a_share_is_the_mean() -> None:
    param = Parameter(torch.zeros(3, 2))
    window = window_of(param)
    for weight in (0.0, 2.0):
        new = torch.sparse_coo_tensor([[1]], torch.full((1, 2), 3.0), (3, 2))
        local_backward(window, param, weight, new)
    assert param.grad.to_dense().tolist() == [[0, 0], [3, 3], [0, 0]]


# Means over ranks


def net() -> nn.Module:
    return OnDemand().double()


ONES = torch.ones(1, 3, dtype=torch.float64)


def rows() -> Tensor:
    return torch.randn(4, 3, dtype=torch.float64) + dist.get_rank()


def backward(
    ddp: DistributedDataParallel,
    x: Tensor = ONES,
    extra: bool = False,
    weight: float | None = None,
    loss: Tensor | None = None,
    reduction: str = "mean",
    is_local: bool = False,
) -> None:
    """Of the sum of the outputs; or of ``loss``, to which they add nothing."""
    with contextlib.ExitStack() as stack:
        if is_local:
            stack.enter_context(ddp.no_sync())
        if weight is not None:
            stack.enter_context(ddp.weighted(weight, reduction))
        outputs = ddp(x, extra=extra).sum()
        (outputs if loss is None else 0 * outputs + loss).backward()


def assert_all(param: Tensor, value: float | Tensor) -> None:
    """Each element of its gradient is the value."""
    torch.testing.assert_close(param.grad, torch.full_like(param, float(value)))


def backwards(rank: int, step: int) -> list[tuple[Tensor, float, bool]]:
    """Inputs, weight, and whether ``extra`` is used, of each backward of a window."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    found = []
    for _ in range(1 + (step + rank) % 3):
        n = int(torch.randint(0, 5, (), generator=generator))
        x = torch.randn(max(n, 1), 3, generator=generator, dtype=torch.float64)
        if n == 0:
            x.fill_(torch.nan)  # what the mean loss of an empty batch gives
        use = bool(torch.randint(0, 2, (), generator=generator))
        found.append((x, n * (0.5 if step % 2 else 1), use))
    return found


def expected(module: nn.Module, step: int, is_sum: bool) -> list[Tensor | None]:
    total, sums = 0.0, [None for _ in module.parameters()]
    for rank in range(dist.get_world_size()):
        for x, n, extra in backwards(rank, step):
            alone = copy.deepcopy(module)
            alone.zero_grad()
            alone(x.nan_to_num() if n == 0 else x, extra).square().mean().backward()
            total += n
            for index, grad in enumerate(gradients(alone)):
                if grad is not None:
                    grad = grad * (n if not is_sum else float(n > 0))
                    sums[index] = grad if sums[index] is None else sums[index] + grad
    return [s if s is None else s / total if total else s * 0 for s in sums]


@pytest.mark.parametrize("is_sum", [False, True], ids=["mean", "sum"])
@pytest.mark.parametrize("cap", [None, 1e-4])
@ranks(2, 3, views=True)
def test_windows_of_different_length_and_weight(
    rank: int, view: bool, is_sum: bool, cap: float
) -> None:
    ddp = wrap(net(), view, bucket_cap_mb=cap)
    for step in range(8):
        ddp.zero_grad()
        window = backwards(rank, step)
        for number, (x, n, extra) in enumerate(window):
            ddp.require_backward_grad_sync = number == len(window) - 1
            with ddp.weighted(n, "sum" if is_sum else "mean"):
                loss = ddp(x if n and not is_sum else x.nan_to_num(), extra).square().mean()
                (loss * (n > 0) if is_sum else loss).backward()
        assert_close(gradients(ddp), expected(ddp.module, step, is_sum), f"step {step}")
        assert_gradients_alike(ddp)


@ranks(3, views=True)
def test_all_weights_zero_give_zero(view: bool) -> None:
    ddp = wrap(net(), view)
    backward(ddp, ONES * torch.nan, weight=0)
    assert ddp.module.extra.weight.grad is None
    assert not ddp.module.first.weight.grad.any()


@ranks(2, views=True)
def test_equal_weights_give_the_bits_of_the_plain_mean(view: bool) -> None:
    x, ddp = rows(), wrap(net(), view)
    backward(ddp, x, extra=True)
    plain = gradients(ddp)
    ddp.zero_grad()
    backward(ddp, x, extra=True, weight=8)
    assert_same_bits(gradients(ddp), plain)


@ranks(2, views=True)
def test_a_weighted_reduction_on_top_of_a_reduced_gradient(rank: int, view: bool) -> None:
    ddp, x = wrap(net(), view), rows()
    backward(ddp, x, weight=1 + rank)
    first = gradients(ddp)
    for n in (2, 5):
        backward(ddp, n * x, weight=n + rank, is_local=True)
    ddp.reduce_gradients()
    both = gradients(ddp)
    ddp.zero_grad()
    for n in (2, 5):
        backward(ddp, n * x, weight=n + rank, is_local=True)
    backward(ddp, x, weight=0)
    sums = [
        None if once is None else once + grad
        for once, grad in zip(first, gradients(ddp), strict=True)
    ]
    assert_close(both, sums)


@ranks(2, views=True)
def test_weighted_on_one_rank_only_is_an_error_on_both(rank: int, view: bool) -> None:
    ddp = wrap(net(), view)
    with pytest.raises(RuntimeError, match="some ranks only") as raised:
        backward(ddp, weight=3 if rank else None)
    for text in gather(str(raised.value)):
        assert "step 1, bucket 0" in text
        assert "rank 0: no weight; rank 1: weight 3" in text
    train_step(ddp, ONES)  # and the next step is right
    assert_gradients_alike(ddp)


@ranks(2, views=True)
def test_a_backward_beside_the_outputs_is_weighted_alone_but_not_accumulated(
    rank: int, view: bool
) -> None:
    ddp = wrap(net(), view)
    weight = ddp.module.first.weight
    ddp(0 * ONES)  # arms the reduction
    with ddp.weighted(1 + 2 * rank):
        (weight.sum() * rank).backward()
    assert_all(weight, 0.75)
    with ddp.weighted(1), ddp.no_sync(), pytest.raises(RuntimeError, match="at the outputs of"):
        weight.sum().backward()
    ddp.zero_grad()
    with ddp.weighted(1, "sum"), ddp.no_sync(), pytest.raises(RuntimeError, match="noticed it"):
        weight.sum().backward()
    ddp.zero_grad()
    backward(ddp, 0 * ONES, weight=1, reduction="sum", is_local=True)
    with ddp.weighted(2, "sum"), ddp.no_sync():
        weight.sum().backward()
    ddp.reduce_gradients()
    assert_all(weight, 1 / 3)


@ranks(2, views=True)
def test_sums_with_one_total_count_and_on_top_of_what_was_reduced(rank: int, view: bool) -> None:
    ddp = wrap(net(), view)
    weight, total = ddp.module.first.weight, 0.0
    for step in (1, 2):  # without zero_grad in between
        for _ in range(2 + rank):
            backward(ddp, loss=3 * weight.sum(), is_local=True)
        backward(ddp, loss=step * weight.sum(), weight=4 + 2 * rank, reduction="sum")
        total += (3 * 5 + 2 * step) / 10
        if step == 1:
            assert_all(weight, total)
            # A second loss, alone: what has been reduced stays what it is.
            backward(ddp, loss=weight.sum(), weight=5, reduction="sum")
            assert_all(weight, total + 0.2)
            ddp.zero_grad()
            total = 0.0
    assert_all(weight, total)


@ranks(2, views=True)
def test_sums_count_where_a_rank_has_no_items(rank: int, view: bool) -> None:
    ddp = wrap(net(), view)
    weight, extra = ddp.module.first.weight, ddp.module.extra.weight
    for step in (1, 2):  # without zero_grad in between
        used = step == 1 or rank == 0
        loss = (1 + 2 * rank) * weight.sum() + (2 * extra.sum() if used else 0)
        # Rank 0 counts the items of all.
        backward(ddp, extra=used, loss=loss, weight=4 * (1 - rank), reduction="sum")
        assert_all(weight, step)
        assert_all(extra, 1 if step == 1 else 1.5)
    gradient = torch.full_like(weight, 1 + 2 * rank)
    with ddp.weighted(4 * rank, "sum"):
        (mean,) = ddp.reduce_gradients([gradient], [weight])
    torch.testing.assert_close(mean, torch.ones_like(weight))


@ranks(2, views=True)
def test_a_broken_microbatch_and_zero_grad_leave_nothing_behind(view: bool) -> None:
    ddp, x = wrap(net(), view), rows()
    backward(ddp, x, extra=True)
    expected = gradients(ddp)
    ddp.zero_grad()
    backward(ddp, 5 * x, extra=True, weight=3, is_local=True)
    kept = gradients(ddp)
    with breaking_off(ddp.module.first.bias):
        backward(ddp, 7 * x, extra=True, weight=2, is_local=True)
    assert_same_bits(gradients(ddp), kept)
    ddp.zero_grad()
    backward(ddp, x, extra=True, weight=4)
    assert_close(gradients(ddp), expected)


@ranks(2, views=True)
def test_a_first_microbatch_that_breaks_leaves_nothing_of_what_was_there_before(view: bool) -> None:
    ddp = wrap(net(), view)
    backward(ddp, extra=True)
    with breaking_off(ddp.module.first.bias):
        backward(ddp, extra=True, weight=2, is_local=True)
    ddp.zero_grad()
    weight = ddp.module.first.weight
    backward(ddp, extra=True, loss=2 * weight.sum(), weight=4, reduction="sum")
    assert_all(weight, 0.5)


@ranks(2, views=True)
def test_gradients_of_a_layer_that_has_gone_do_not_keep_a_window_that_zero_grad_dropped(
    rank: int, view: bool
) -> None:
    ddp = wrap(net(), view)
    backward(ddp, extra=True)
    former, weight = ddp.module.extra, ddp.module.first.weight
    ddp.module.extra = copy.deepcopy(former).requires_grad_(True)
    backward(ddp, extra=True, weight=5, is_local=True)
    ddp.zero_grad()
    assert former.weight.grad is not None
    of_sum = {"weight": 1 + 2 * rank, "reduction": "sum"}
    backward(ddp, extra=True, loss=weight.sum(), **of_sum)
    assert_all(weight, 0.5)


@ranks(2, views=True)
def test_gradients_dropped_by_zero_grad_leave_no_weight_for_a_request(
    rank: int, view: bool
) -> None:
    ddp = wrap(net(), view)
    backward(ddp, weight=1 + rank, is_local=True)
    ddp.zero_grad()
    with ddp.weighted(1 - rank):  # an error if those before had a weight still
        ddp.reduce_gradients()
    for param in ddp.parameters():
        param.grad = torch.full_like(param, rank)
    ddp.reduce_gradients()
    for param in ddp.parameters():
        assert_all(param, 0.5)


@pytest.mark.parametrize("to_none", [True, False])
@ranks(2, views=True)
def test_a_window_that_is_dropped_does_not_count(rank: int, view: bool, to_none: bool) -> None:
    ddp, x = wrap(net(), view), rows()
    backward(ddp, x, extra=True, weight=100 * rank, is_local=True)
    ddp.zero_grad(set_to_none=to_none)
    backward(ddp, x, extra=True, weight=2)
    found = gradients(ddp)
    ddp.zero_grad()
    backward(ddp, x, extra=True)
    assert_close(gradients(ddp), found)


@ranks(2, views=True)
def test_large_weights_do_not_overflow_fp16_once_their_size_is_known(view: bool) -> None:
    ddp = wrap(nn.Linear(1, 1, bias=False).half(), view)
    for n in (1, 4000, 30_000):  # each within the range of the one before
        with ddp.weighted(n):
            train_step(ddp, torch.full((1, 1), 10.0, dtype=torch.half), loss=torch.sum)
    assert ddp.module.weight.grad.item() == 10


@ranks(2)
def test_the_weight_costs_no_collective() -> None:
    ddp = DistributedDataParallel(net(), bucket_cap_mb=1e-4)
    for step in range(3):
        with counted(ddp) as found:
            backward(ddp, weight=3)
        assert found.collectives == len(ddp.reducer.buckets) + (step == 0)  # the order, at first


class SharesMemory(nn.Module):
    """The gradient of ``shift`` is a view of what goes on to ``mix``."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4).double()
        self.shift = nn.Parameter(torch.randn(2, 2, dtype=torch.float64))

    def forward(self, x: Tensor, shifted: bool = True) -> Tensor:
        y = self.mix(x)
        return (y + self.shift.view(4) if shifted else y).square().sum()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@ranks(2, views=True)
def test_gradients_are_not_weighted_where_the_backward_still_reads_them(
    reduction: str, view: bool
) -> None:
    """Autograd may hand over memory of which it holds a view."""
    model = SharesMemory()
    alone = copy.deepcopy(model)
    ddp = wrap(model, view, bucket_cap_mb=1e-6)
    for _ in range(3):
        for net in (alone, ddp):
            net.zero_grad()
        x = torch.randn(4, dtype=torch.float64)
        with ddp.no_sync(), ddp.weighted(2, reduction):
            ddp(x, shifted=False).backward()
        (alone(x, shifted=False) * (2 if reduction == "mean" else 1)).backward()
        with ddp.weighted(3, reduction):
            ddp(x).backward()
        (alone(x) * (3 if reduction == "mean" else 1)).backward()
        assert_close(gradients(ddp), [grad / 5 for grad in gradients(alone)])


@ranks(2, views=True)
def test_a_parameter_added_in_a_window_that_its_last_backward_does_not_use(
    rank: int, view: bool
) -> None:
    """On no rank: what it has is of backwards under no_sync, set aside while the last one runs."""

    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.extra = nn.Linear(2, 1, bias=False), None

        def forward(self, x: Tensor, uses_extra: bool = False) -> Tensor:
            y = self.first(x).sum()
            return y + self.extra(x).sum() if uses_extra else y

    x = torch.ones(1, 2)
    net = wrap(Growing(), view)
    net(x).backward()
    net.module.extra = nn.Linear(2, 1, bias=False)
    net.zero_grad()
    for weight in (1, 2):
        with net.no_sync(), net.weighted(weight):
            net(weight * x, uses_extra=rank == 1).backward()
    with net.weighted(3):
        net(x).backward()
    # Rank 1 has (1 * 1 + 2 * 2) over the six items of each rank.
    assert_all(net.module.extra.weight, 5 / 12)
