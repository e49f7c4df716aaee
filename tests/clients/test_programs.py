"""Programs that people have, run as they are: the class is all that differs, or there is none."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed import assert_same_bits, assert_same_on_all_ranks, gather, ranks
from programs import PROGRAMS, Results, bare, state
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tritonddp import DistributedDataParallel, ddp, replicate

STOCK = nn.parallel.DistributedDataParallel
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
# What is never trained: copies are plain modules, and what has no backward exchanges nothing.
OWN = {"average_of_the_wrapper": "average.", "student_and_teacher": "teacher."}
QUICK = {"gpt_under_no_sync", "pairs_contrasted_over_all_ranks"}  # in `make test`, in place too


def assert_same(ours: Results, stock: Results) -> None:
    assert ours.keys() == stock.keys()
    for name, value in ours.items():
        if isinstance(value, Tensor):
            assert_same_bits(value, stock[name], name)
        elif isinstance(value, dict):
            assert_same(value, stock[name])
        else:
            assert value == stock[name], f"{name}: {value} is not {stock[name]}"


@pytest.mark.parametrize("name", PROGRAMS)
@ranks(2)
def test_a_program_of_a_user_ends_with_stocks_bits(name: str) -> None:
    program = PROGRAMS[name]
    ours, stock = program(DistributedDataParallel), program(STOCK)
    assert_same(ours, stock)
    params = {key: value for key, value in ours.items() if not key.endswith(BUFFERS)}
    assert_same_on_all_ranks([value for value in params.values() if isinstance(value, Tensor)])


def in_place(module: nn.Module, **options: Any) -> nn.Module:
    """What a program gets for the class: it returns the module itself.

    A module that is replicated stays so: where a program wraps again, there is nothing to do.
    """
    try:
        ddp(module)
    except TypeError:
        assert replicate(module, **options) is module
    return module


def without_prefix(results: Results) -> Results:
    """With names as they are without a wrapper."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return without_prefix(value)
        if isinstance(value, list):
            return [
                each.replace("module.", "") if isinstance(each, str) else each for each in value
            ]
        return value

    return {name.replace("module.", ""): plain(value) for name, value in results.items()}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.long]) for name in PROGRAMS],
)
@ranks(2)
def test_a_program_ends_with_stocks_bits_in_place_too(name: str) -> None:
    program = PROGRAMS[name]
    ours, stock = program(in_place), program(STOCK)
    names = [*ours, *ours.get("keys", ())]
    # (AveragedModel has a .module of its own.)
    assert not [each for each in names if "module." in each and not each.startswith("average.")]
    ours, stock = without_prefix(ours), without_prefix(stock)
    with_buffers_of(gather(stock)[0], ours, stock, OWN.get(name, "none of them"))
    assert_same(ours, stock)


def with_buffers_of(first: Results, ours: Results, stock: Results, own: str) -> None:
    """Put the buffers of the first rank into ``stock``, where they have come to this one in place.

    They do so at the end of a reduced backward, and with stock at the beginning of a forward.
    """
    for key, value in ours.items():
        if isinstance(value, dict):
            with_buffers_of(first[key], value, stock[key], own)
        elif key.endswith(BUFFERS) and key.startswith(own):
            stock[key] = value
        elif key.endswith(BUFFERS) and torch.equal(value, first[key]):
            stock[key] = first[key]


# Checkpoints


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()


def made(wrapper: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(dist.get_rank())
    model = wrapper(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


WRAPPERS: dict[str, Any] = {
    "stock": STOCK,
    "ours": DistributedDataParallel,
    "in place": in_place,
}


@pytest.mark.parametrize(
    ("first", "then"),
    [("stock", "ours"), ("ours", "stock"), ("stock", "in place"), ("in place", "stock")],
)
@ranks(2)
def test_a_distributed_checkpoint_of_one_class_resumes_in_the_other(
    first: str, then: str, tmp_path: Path
) -> None:
    before, after = WRAPPERS[first], WRAPPERS[then]
    path = gather(str(tmp_path))[0]
    model, optimizer = made(before)
    train(model, optimizer, range(3))
    params, moments = get_state_dict(model, optimizer)
    dcp.save({"model": params, "optimizer": moments}, checkpoint_id=path)
    train(model, optimizer, range(3, 6))  # never interrupted
    resumed, its_optimizer = made(after)
    params, moments = get_state_dict(resumed, its_optimizer)
    dcp.load({"model": params, "optimizer": moments}, checkpoint_id=path)
    set_state_dict(resumed, its_optimizer, model_state_dict=params, optim_state_dict=moments)
    train(resumed, its_optimizer, range(3, 6))
    assert_same(state(model=bare(resumed)), state(model=bare(model)))


# Metrics


@pytest.mark.long
@pytest.mark.skipif(
    importlib.util.find_spec("torchmetrics") is None,
    reason="needs torchmetrics: the extra [integrations]",
)
@ranks(2)
def test_metrics_that_ranks_exchange_between_forward_and_backward_do_not_disturb_it() -> None:
    from torchmetrics import classification

    def run(wrapper: Any) -> Results:
        torch.manual_seed(dist.get_rank())
        model = wrapper(nn.Linear(6, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        # Its collectives are between forward and backward, in each step.
        metric = classification.MulticlassAccuracy(3, dist_sync_on_step=True)
        found = []
        for _ in range(4):
            x, y = torch.randn(5, 6), torch.randint(3, (5,))
            logits = model(x)
            found.append(metric(logits.detach(), y).item())
            optimizer.zero_grad()
            nn.functional.cross_entropy(logits, y).backward()
            optimizer.step()
        return state(model=model) | {"metrics": [*found, metric.compute().item()]}

    stock = run(STOCK)
    assert_same(run(DistributedDataParallel), stock)
    assert_same(run(in_place), without_prefix(stock))
