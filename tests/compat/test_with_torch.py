"""What torch builds on top of the wrapper: mixed precision, pipelines, converted layers."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, assert_same_on_all_ranks, ranks
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from tritonddp import DistributedDataParallel

STOCK = nn.parallel.DistributedDataParallel


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 2))


def batch(rank: int, step: int = 0) -> Tensor:
    torch.manual_seed(100 * step + rank)
    return torch.randn(4, 6)


# Mixed precision


def train_with_scaler(wrapper: Any) -> tuple[list[Tensor], list[float], list[bool]]:
    """Parameters at the end, the scale after each step, and which steps changed parameters."""
    ddp = wrapper(network())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    scales, changed = [], []
    for step in range(8):
        before = [param.detach().clone() for param in ddp.parameters()]
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = ddp(batch(dist.get_rank(), step)).float().square().mean()
        if step in (2, 5) and dist.get_rank() == step % 2:
            loss = loss * torch.inf  # one rank overflows
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        changed.append(
            any(not torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))
        )
    return [param.detach() for param in ddp.parameters()], scales, changed


@ranks(2)
def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    params, scales, changed = train_with_scaler(DistributedDataParallel)
    assert changed == [step not in (2, 5) for step in range(8)]
    assert_same_on_all_ranks([*params, torch.tensor(scales)])
    stock_params, stock_scales, _ = train_with_scaler(STOCK)
    assert scales == stock_scales
    for param, stock in zip(params, stock_params, strict=True):
        assert_same_bits(param, stock)


@ranks(2)
def test_autocast_to_bfloat16_gives_stocks_gradients() -> None:
    ours, stock = DistributedDataParallel(network()), STOCK(network())
    for ddp in (ours, stock):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = ddp(batch(dist.get_rank()))
            assert output.dtype == torch.bfloat16
            output.square().mean().backward()
    for param, other in zip(ours.parameters(), stock.parameters(), strict=True):
        assert param.grad is not None
        assert_same_bits(param.grad, other.grad)


# Layers


@ranks(2)
def test_converted_batch_norm_on_the_cpu_is_refused_as_by_stock() -> None:
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(
        nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
    )
    for wrapper in (STOCK, DistributedDataParallel):
        # stock notices in the forward, where its layer wants a GPU
        with pytest.raises(ValueError, match=r"SyncBatchNorm .*GPU"):
            wrapper(converted)(batch(0))


# Pipelines

MICROBATCHES = 2


def stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 6)]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
@ranks(4)
def test_each_stage_of_a_pipeline_may_be_wrapped(schedule: Any) -> None:
    rank = dist.get_rank()
    replica, number = divmod(rank, 2)  # two replicas of a pipeline of two stages
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    ddp = DistributedDataParallel(stages()[number], process_group=replicas[number])
    stage = PipelineStage(
        ddp,
        number,
        2,
        torch.device("cpu"),
        input_args=(torch.empty(2, 6),),
        group=pipelines[replica],
    )
    pipeline = schedule(stage, MICROBATCHES, loss_fn=loss_of)
    for step in range(3):
        ddp.zero_grad()
        x = batch(replica, step)
        pipeline.step(*([x] if number == 0 else []), **({"target": x.tanh()} if number else {}))
        alone = nn.Sequential(*stages())
        for other in range(2):
            x = batch(other, step)
            (loss_of(alone(x), x.tanh()) / 2).backward()
        for param, expected in zip(ddp.parameters(), alone[number].parameters(), strict=True):
            torch.testing.assert_close(param.grad, expected.grad)
    assert ddp.reducer.counters.reductions == 3  # one a step, not one a microbatch
