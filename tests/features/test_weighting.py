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
from distributed import assert_same_on_all_ranks, gather, ranks
from torch import nn
from torch.nn import Parameter

from tritonddp import DistributedDataParallel
from tritonddp.coordination.agreement import Weight
from tritonddp.features.weighted_mean import AccumulationWindow, weight_of
from tritonddp.reducer.extension import SyncState

VIEW = pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])


@pytest.mark.parametrize("n", [0, 3, 2.5, torch.tensor(4), torch.tensor([0.5])])
def test_numbers_and_tensors_of_one_element_are_weights(n):
    assert weight_of(n, "mean").items == float(n)


@pytest.mark.parametrize("n", ["3", None, True, torch.ones(2), 1j])
def test_what_is_no_number_is_refused(n):
    with pytest.raises(TypeError, match="number of items"):
        weight_of(n, "mean")


@pytest.mark.parametrize("n", [-1, math.nan, math.inf, 10**400, torch.tensor(-0.5)])
def test_a_weight_out_of_range_is_refused(n):
    with pytest.raises(ValueError, match="finite and not negative"):
        weight_of(n, "mean")


def test_an_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match="'none'"):
        weight_of(1, "none")


def window_of(param: Parameter) -> AccumulationWindow:
    """Of a module with this one parameter."""
    parameters: Any = SimpleNamespace(params=[("param", param)], added=[])
    manager: Any = SimpleNamespace(current=SimpleNamespace(params=[param]))
    return AccumulationWindow(parameters, SyncState(), manager)


def accumulate(gradients: list[float | None], weights: list[float], before: float | None) -> float:
    """What one parameter's ``.grad`` is after local backwards with these gradients."""
    param = Parameter(torch.zeros(1, dtype=torch.float64))
    param.grad = None if before is None else torch.full_like(param, before)
    window = window_of(param)
    for gradient, weight in zip(gradients, weights, strict=True):
        window.open(Weight(weight, is_sum=False), is_last=False, is_first=False, is_late=False)
        if gradient is not None:
            new = torch.full_like(param, gradient)
            param.grad = new if param.grad is None else param.grad + new
        window.close([param])
    assert window.weight == Weight(sum(weights), is_sum=False)
    return math.nan if param.grad is None else param.grad.item()


@pytest.mark.parametrize("before", [None, 10.0])
@pytest.mark.parametrize("gradients", list(itertools.product([1.0, None, -4.0], repeat=3)))
def test_a_window_holds_the_weighted_mean_on_top_of_what_was_there(gradients, before):
    weights = [2.0, 0.5, 3.0]
    found = accumulate(list(gradients), weights, before)
    if before is None and all(gradient is None for gradient in gradients):
        assert math.isnan(found)
        return
    mean = sum(w * (g or 0) for w, g in zip(weights, gradients, strict=True)) / sum(weights)
    assert found == pytest.approx(mean + (before or 0), rel=1e-14)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_gradient_of_weight_zero_may_be_nan(place):
    gradients, weights = [1.0, 2.0, 4.0], [1.0, 1.0, 2.0]
    gradients[place], weights[place] = math.nan, 0.0
    mean = sum(w * g for w, g in zip(weights, gradients, strict=True) if w) / sum(weights)
    assert accumulate(gradients, weights, None) == pytest.approx(mean)


def test_an_unweighted_backward_after_weighted_ones_is_an_error_until_they_are_dropped():
    param = Parameter(torch.zeros(1))
    window = window_of(param)
    window.open(Weight(1, is_sum=False), is_last=False, is_first=False, is_late=False)
    param.grad = torch.ones(1)
    window.close([param])
    with pytest.raises(RuntimeError, match="has no weight"):
        window.open(None, is_last=True, is_first=False, is_late=False)
    param.grad = None
    window.open(None, is_last=True, is_first=False, is_late=False)
    assert window.weight is None


def test_means_and_sums_are_not_mixed():
    param = Parameter(torch.zeros(1))
    window = window_of(param)
    window.open(Weight(1, is_sum=False), is_last=False, is_first=False, is_late=False)
    window.close([param])
    with pytest.raises(RuntimeError, match="'mean' and with reduction='sum'"):
        window.open(Weight(1, is_sum=True), is_last=False, is_first=False, is_late=False)


def test_a_broken_backward_leaves_the_window_as_it_was():
    param = Parameter(torch.zeros(1))
    window = window_of(param)
    window.open(Weight(1, is_sum=False), is_last=False, is_first=False, is_late=False)
    param.grad = mean = torch.ones(1)
    window.close([param])
    window.open(Weight(3, is_sum=False), is_last=False, is_first=False, is_late=False)
    param.grad = torch.full((1,), 7.0)
    window.on_abort(None)
    assert param.grad is mean
    assert mean.item() == 1
    assert window.weight == Weight(1, is_sum=False)


class Net(nn.Module):
    """Uses ``extra`` only if asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra = nn.Linear(3, 40), nn.Linear(40, 40)
        self.last = nn.Linear(40, 2)
        self.double()

    def forward(self, x: torch.Tensor, extra: bool) -> torch.Tensor:
        x = self.first(x).tanh()
        return self.last(self.extra(x) if extra else x)


def backwards(rank: int, step: int) -> list[tuple[torch.Tensor, float, bool]]:
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


def expected(module: nn.Module, step: int, is_sum: bool) -> list[torch.Tensor | None]:
    total, sums = 0.0, [None for _ in module.parameters()]
    for rank in range(dist.get_world_size()):
        for x, n, extra in backwards(rank, step):
            alone = copy.deepcopy(module)
            alone.zero_grad()
            alone(x.nan_to_num() if n == 0 else x, extra).square().mean().backward()
            total += n
            for index, param in enumerate(alone.parameters()):
                if param.grad is not None:
                    gradient = param.grad * (n if not is_sum else float(n > 0))
                    sums[index] = gradient if sums[index] is None else sums[index] + gradient
    return [s if s is None else s / total if total else s * 0 for s in sums]


@VIEW
@pytest.mark.parametrize("is_sum", [False, True], ids=["mean", "sum"])
@pytest.mark.parametrize("cap", [None, 1e-4])
@ranks(2, 3)
def test_windows_of_different_length_and_weight(view: bool, is_sum: bool, cap: float) -> None:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Net(), gradient_as_bucket_view=view, bucket_cap_mb=cap)
    for step in range(8):
        ddp.zero_grad()
        window = backwards(dist.get_rank(), step)
        for number, (x, n, extra) in enumerate(window):
            ddp.require_backward_grad_sync = number == len(window) - 1
            with ddp.weighted(n, "sum" if is_sum else "mean"):
                loss = ddp(x if n and not is_sum else x.nan_to_num(), extra).square().mean()
                (loss * (n > 0) if is_sum else loss).backward()
        for (name, param), mean in zip(
            ddp.module.named_parameters(), expected(ddp.module, step, is_sum), strict=True
        ):
            message = f"step {step}, {name}"
            assert (param.grad is None) == (mean is None), message
            if mean is not None:
                torch.testing.assert_close(param.grad, mean, msg=lambda m, t=message: f"{t}: {m}")
        assert_same_on_all_ranks([param.grad for param in ddp.parameters()])


@VIEW
@ranks(3)
def test_all_weights_zero_give_zero(view: bool) -> None:
    ddp = DistributedDataParallel(Net(), gradient_as_bucket_view=view)
    with ddp.weighted(0):
        ddp(torch.full((1, 3), torch.nan, dtype=torch.float64), extra=False).sum().backward()
    assert ddp.module.extra.weight.grad is None
    assert not ddp.module.first.weight.grad.any()


@VIEW
@ranks(2)
def test_equal_weights_give_the_bits_of_the_plain_mean(view: bool) -> None:
    x = torch.randn(4, 3, dtype=torch.float64) + dist.get_rank()
    ddp = DistributedDataParallel(Net(), gradient_as_bucket_view=view)
    ddp(x, extra=True).sum().backward()
    plain = [param.grad.clone() for param in ddp.parameters()]
    ddp.zero_grad()
    with ddp.weighted(8):
        ddp(x, extra=True).sum().backward()
    assert all(map(torch.equal, plain, [param.grad for param in ddp.parameters()]))


@VIEW
@ranks(2)
def test_a_weighted_reduction_on_top_of_a_reduced_gradient(view: bool) -> None:
    ddp = DistributedDataParallel(Net(), gradient_as_bucket_view=view)
    rank = dist.get_rank()
    x = torch.randn(4, 3, dtype=torch.float64) + rank
    with ddp.weighted(1 + rank):
        ddp(x, extra=False).sum().backward()
    first = [None if p.grad is None else p.grad.clone() for p in ddp.parameters()]
    for n in (2, 5):
        with ddp.weighted(n + rank), ddp.no_sync():
            ddp(n * x, extra=False).sum().backward()
    ddp.reduce_gradients()
    means = [None if p.grad is None else p.grad.clone() for p in ddp.parameters()]
    ddp.zero_grad()
    for n in (2, 5):
        with ddp.weighted(n + rank), ddp.no_sync():
            ddp(n * x, extra=False).sum().backward()
    with ddp.weighted(0):
        ddp(x, extra=False).sum().backward()
    for mean, once, param in zip(means, first, ddp.parameters(), strict=True):
        if once is None:
            assert mean is None
            assert param.grad is None
        else:
            torch.testing.assert_close(mean, once + param.grad)


@VIEW
@ranks(2)
def test_weighted_on_one_rank_only_is_an_error_on_both(view: bool) -> None:
    ddp = DistributedDataParallel(Net(), gradient_as_bucket_view=view)
    x = torch.ones(1, 3, dtype=torch.float64)
    weighted = ddp.weighted(3) if dist.get_rank() else contextlib.nullcontext()
    with weighted, pytest.raises(RuntimeError, match="some ranks only") as raised:
        ddp(x, extra=False).sum().backward()
    for text in gather(str(raised.value)):
        assert "step 1, bucket 0" in text
        assert "rank 0: no weight; rank 1: weight 3" in text
    ddp.zero_grad()
    ddp(x, extra=False).sum().backward()  # and the next step is right
    assert_same_on_all_ranks([param.grad for param in ddp.parameters()])


@VIEW
@ranks(2)
def test_a_backward_beside_the_outputs_is_weighted_alone_but_not_accumulated(view: bool) -> None:
    ddp = DistributedDataParallel(Net(), gradient_as_bucket_view=view)
    rank = dist.get_rank()
    weight = ddp.module.first.weight
    ddp(torch.zeros(1, 3, dtype=torch.float64), extra=False)  # arms the reduction
    with ddp.weighted(1 + 2 * rank):
        (weight.sum() * rank).backward()
    torch.testing.assert_close(weight.grad, torch.full_like(weight, 0.75))
    with ddp.weighted(1), ddp.no_sync(), pytest.raises(RuntimeError, match="at the outputs of"):
        weight.sum().backward()
    ddp.zero_grad()
    with ddp.weighted(1, "sum"), ddp.no_sync(), pytest.raises(RuntimeError, match="noticed it"):
        weight.sum().backward()
    ddp.zero_grad()
    with ddp.weighted(1, "sum"), ddp.no_sync():
        ddp(torch.zeros(1, 3, dtype=torch.float64), extra=False).sum().backward()
    with ddp.weighted(2, "sum"), ddp.no_sync():
        weight.sum().backward()
    ddp.reduce_gradients()
    torch.testing.assert_close(weight.grad, torch.full_like(weight, 1 / 3))


@VIEW
@ranks(2)
def test_sums_with_one_total_count_and_on_top_of_what_was_reduced(view: bool) -> None:
    ddp = DistributedDataParallel(Net(), gradient_as_bucket_view=view)
    rank = dist.get_rank()
    weight, x = ddp.module.first.weight, torch.ones(1, 3, dtype=torch.float64)
    out = torch.zeros(())

    def backward(times: float) -> None:
        (times * (0 * ddp(x, extra=False).sum() + weight.sum())).backward()

    for step in (1, 2):  # without zero_grad in between
        for _ in range(2 + rank):
            with ddp.no_sync():
                backward(3)
        with ddp.weighted(4 + 2 * rank, "sum"):
            backward(step)
        out = out + (3 * 5 + 2 * step) / 10
        if step == 1:
            torch.testing.assert_close(weight.grad, torch.full_like(weight, out))
            # A second loss, alone: what has been reduced stays what it is.
            with ddp.weighted(5, "sum"):
                backward(1)
            torch.testing.assert_close(weight.grad, torch.full_like(weight, out + 0.2))
            ddp.zero_grad()
            out = torch.zeros(())
    torch.testing.assert_close(weight.grad, torch.full_like(weight, out))


@VIEW
@ranks(2)
def test_sums_count_where_a_rank_has_no_items(view: bool) -> None:
    ddp = DistributedDataParallel(Net(), gradient_as_bucket_view=view)
    rank = dist.get_rank()
    weight, extra = ddp.module.first.weight, ddp.module.extra.weight
    x = torch.ones(1, 3, dtype=torch.float64)
    for step in (1, 2):  # without zero_grad in between
        used = step == 1 or rank == 0
        loss = 0 * ddp(x, extra=used).sum() + (1 + 2 * rank) * weight.sum()
        if used:
            loss = loss + 2 * extra.sum()
        with ddp.weighted(4 * (1 - rank), "sum"):  # rank 0 counts the items of all
            loss.backward()
        torch.testing.assert_close(weight.grad, torch.full_like(weight, step))
        torch.testing.assert_close(extra.grad, torch.full_like(extra, 1 if step == 1 else 1.5))
    gradient = torch.full_like(weight, 1 + 2 * rank)
    with ddp.weighted(4 * rank, "sum"):
        (mean,) = ddp.reduce_gradients([gradient], [weight])
    torch.testing.assert_close(mean, torch.ones_like(weight))


@VIEW
@ranks(2)
def test_a_broken_microbatch_and_zero_grad_leave_nothing_behind(view: bool) -> None:
    ddp = DistributedDataParallel(Net(), gradient_as_bucket_view=view)
    rank = dist.get_rank()
    x = torch.randn(4, 3, dtype=torch.float64) + rank
    ddp(x, extra=True).sum().backward()
    expected = [param.grad.clone() for param in ddp.parameters()]
    ddp.zero_grad()
    with ddp.no_sync():
        with ddp.weighted(3):
            ddp(5 * x, extra=True).sum().backward()
        kept = [param.grad.clone() for param in ddp.parameters()]
        loss = ddp(7 * x, extra=True).sum()
        handle = ddp.module.first.bias.register_hook(_break)
        with ddp.weighted(2), pytest.raises(ZeroDivisionError):
            loss.backward()
        handle.remove()
        assert all(map(torch.equal, kept, [param.grad for param in ddp.parameters()]))
    ddp.zero_grad()
    with ddp.weighted(4):
        ddp(x, extra=True).sum().backward()
    for param, value in zip(ddp.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad, value)


@VIEW
@ranks(2)
def test_a_first_microbatch_that_breaks_leaves_nothing_of_what_was_there_before(view: bool) -> None:
    ddp = DistributedDataParallel(Net(), gradient_as_bucket_view=view)
    x = torch.ones(1, 3, dtype=torch.float64)
    ddp(x, extra=True).sum().backward()
    handle = ddp.module.first.bias.register_hook(_break)
    with ddp.no_sync(), ddp.weighted(2), pytest.raises(ZeroDivisionError):
        ddp(x, extra=True).sum().backward()
    handle.remove()
    ddp.zero_grad()
    weight = ddp.module.first.weight
    with ddp.weighted(4, "sum"):
        (0 * ddp(x, extra=True).sum() + 2 * weight.sum()).backward()
    torch.testing.assert_close(weight.grad, torch.full_like(weight, 0.5))


@VIEW
@ranks(2)
def test_gradients_of_a_layer_that_has_gone_do_not_keep_a_window_that_zero_grad_dropped(
    view: bool,
) -> None:
    ddp = DistributedDataParallel(Net(), gradient_as_bucket_view=view)
    x, weight = torch.ones(1, 3, dtype=torch.float64), ddp.module.first.weight
    ddp(x, extra=True).sum().backward()
    former = ddp.module.extra
    ddp.module.extra = copy.deepcopy(former).requires_grad_(True)
    with ddp.no_sync(), ddp.weighted(5):
        ddp(x, extra=True).sum().backward()
    ddp.zero_grad()
    assert former.weight.grad is not None
    with ddp.weighted(1 + 2 * dist.get_rank(), "sum"):
        (0 * ddp(x, extra=True).sum() + weight.sum()).backward()
    torch.testing.assert_close(weight.grad, torch.full_like(weight, 0.5))


@VIEW
@ranks(2)
def test_gradients_dropped_by_zero_grad_leave_no_weight_for_a_request(view: bool) -> None:
    ddp = DistributedDataParallel(Net(), gradient_as_bucket_view=view)
    x = torch.ones(1, 3, dtype=torch.float64)
    with ddp.no_sync(), ddp.weighted(1 + dist.get_rank()):
        ddp(x, extra=False).sum().backward()
    ddp.zero_grad()
    with ddp.weighted(1 - dist.get_rank()):  # an error if those before had a weight still
        ddp.reduce_gradients()
    for param in ddp.parameters():
        param.grad = torch.full_like(param, dist.get_rank())
    ddp.reduce_gradients()
    for param in ddp.parameters():
        torch.testing.assert_close(param.grad, torch.full_like(param, 0.5))


def _break(_: torch.Tensor) -> None:
    raise ZeroDivisionError


@VIEW
@pytest.mark.parametrize("to_none", [True, False])
@ranks(2)
def test_a_window_that_is_dropped_does_not_count(view: bool, to_none: bool) -> None:
    ddp = DistributedDataParallel(Net(), gradient_as_bucket_view=view)
    rank = dist.get_rank()
    x = torch.randn(4, 3, dtype=torch.float64) + rank
    with ddp.weighted(100 * rank), ddp.no_sync():
        ddp(x, extra=True).sum().backward()
    ddp.zero_grad(set_to_none=to_none)
    with ddp.weighted(2):
        ddp(x, extra=True).sum().backward()
    found = [param.grad.clone() for param in ddp.parameters()]
    ddp.zero_grad()
    ddp(x, extra=True).sum().backward()
    for param, value in zip(ddp.parameters(), found, strict=True):
        torch.testing.assert_close(param.grad, value)


@VIEW
@ranks(2)
def test_large_weights_do_not_overflow_fp16_once_their_size_is_known(view: bool) -> None:
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False).half(), gradient_as_bucket_view=view)
    for n in (1, 4000, 30_000):  # each within the range of the one before
        ddp.zero_grad()
        with ddp.weighted(n):
            ddp(torch.full((1, 1), 10.0, dtype=torch.half)).sum().backward()
    assert ddp.module.weight.grad.item() == 10


@ranks(2)
def test_the_weight_costs_no_collective() -> None:
    ddp = DistributedDataParallel(Net(), bucket_cap_mb=1e-4)
    x = torch.ones(1, 3, dtype=torch.float64)
    for step in range(3):
        before = ddp.reducer.counters.collectives
        with ddp.weighted(3):
            ddp(x, extra=False).sum().backward()
        order = 1 if step == 0 else 0
        assert ddp.reducer.counters.collectives - before == len(ddp.reducer.buckets) + order


class SharesMemory(nn.Module):
    """The gradient of ``shift`` is a view of what goes on to ``mix``."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4).double()
        self.shift = nn.Parameter(torch.randn(2, 2, dtype=torch.float64))

    def forward(self, x: torch.Tensor, shifted: bool = True) -> torch.Tensor:
        y = self.mix(x)
        return (y + self.shift.view(4) if shifted else y).square().sum()


@VIEW
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@ranks(2)
def test_gradients_are_not_weighted_where_the_backward_still_reads_them(
    reduction: str, view: bool
) -> None:
    """Autograd may hand over memory of which it holds a view."""
    torch.manual_seed(0)
    model = SharesMemory()
    alone = copy.deepcopy(model)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=view, bucket_cap_mb=1e-6)
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
        for ours, own in zip(ddp.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, own.grad / 5)


@VIEW
@ranks(2)
def test_a_parameter_added_in_a_window_that_its_last_backward_does_not_use(view):
    """On no rank: what it has is of backwards under no_sync, set aside while the last one runs."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(2, 1, bias=False)
            self.extra = None

        def forward(self, x, uses_extra=False):
            y = self.first(x).sum()
            return y + self.extra(x).sum() if uses_extra else y

    torch.manual_seed(0)
    rank, x = dist.get_rank(), torch.ones(1, 2)
    net = DistributedDataParallel(Net(), gradient_as_bucket_view=view)
    net(x).backward()
    net.module.extra = nn.Linear(2, 1, bias=False)
    net.zero_grad()
    for weight in (1, 2):
        with net.no_sync(), net.weighted(weight):
            net(weight * x, uses_extra=rank == 1).backward()
    with net.weighted(3):
        net(x).backward()
    # Rank 1 has (1 * 1 + 2 * 2) over the six items of each rank.
    expected = torch.full((1, 2), 5 / 12)
    torch.testing.assert_close(net.module.extra.weight.grad, expected)


def test_a_sparse_gradient_that_alone_has_a_share_is_the_mean():
    param = Parameter(torch.zeros(3, 2))
    window = window_of(param)
    for weight in (0.0, 2.0):
        window.open(Weight(weight, is_sum=False), is_last=False, is_first=False, is_late=False)
        new = torch.sparse_coo_tensor([[1]], torch.full((1, 2), 3.0), (3, 2))
        param.grad = new if param.grad is None else param.grad + new
        window.close([param])
    assert param.grad.to_dense().tolist() == [[0, 0], [3, 3], [0, 0]]
