"""Wrappers in torch's pipelines and ``AveragedModel``."""

import torch
import torch.distributed as dist
from distributed import assert_same_bits, ranks
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.optim.swa_utils import AveragedModel, update_bn
from versions import needs_pipelines

from tritonddp import DistributedDataParallel

STOCK = nn.parallel.DistributedDataParallel


def batch(rank: int, step: int = 0) -> Tensor:
    torch.manual_seed(100 * step + rank)
    return torch.randn(4, 6)


# Pipelines

MICROBATCHES = 2


def stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 6)]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@needs_pipelines
@ranks(4)
def test_each_stage_of_a_pipeline_may_be_wrapped() -> None:
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
    pipeline = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
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
    assert ddp.reducer.counters.reductions == 3  # one per step, not per microbatch


# Averages of the model


@ranks(2)
def test_an_averaged_model_has_the_bits_of_stock() -> None:
    """``AveragedModel`` copies the wrapper, and ``update_bn`` recomputes its statistics."""
    found = []
    for wrapper in (STOCK, DistributedDataParallel):
        torch.manual_seed(0)
        model = wrapper(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
        average = AveragedModel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            model(batch(dist.get_rank(), step)).square().mean().backward()
            optimizer.step()
            average.update_parameters(model)
        update_bn([batch(dist.get_rank(), step) for step in range(3)], average)
        found.append([value.detach() for value in average.state_dict().values()])
    assert_same_bits(found[1], found[0])
