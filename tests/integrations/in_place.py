"""Trains with an adapter that replicates in place, and asks for all that the library has beside.

    torchrun --standalone --nproc-per-node 2 tests/integrations/in_place.py lightning

Each rank asserts what it sees.
"""

import copy
import logging
import os
import sys
import tempfile
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import tritonddp


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.norm, self.head = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def encode(self, x: Tensor) -> Tensor:
        return self.norm(self.encoder(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))


def inputs() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=3)


def is_reduced(module: nn.Module) -> bool:
    """Whether the ranks have the same gradients, which are dropped."""
    own = [param.grad.flatten() for param in module.parameters() if param.grad is not None]
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, torch.cat(own))
    module.zero_grad()
    return torch.equal(*everyones)


def with_accelerate() -> None:
    from accelerate import Accelerator
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

    from tritonddp.integrations.accelerate import use_tritonddp

    wanted = DistributedDataParallelKwargs(bucket_cap_mb=1, comm_hook=DDPCommunicationHookType.FP16)
    accelerator = Accelerator(
        cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2, kwargs_handlers=[wanted]
    )
    use_tritonddp(accelerator, in_place=True, metrics=True)
    module = Network()
    model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    assert model is module
    (hook, _), *others = tritonddp.ddp(model)._comm_hooks
    assert hook.__name__ == "fp16_compress_hook"
    assert not others
    assert accelerator.ddp_handler is wanted
    assert {"bucket_cap_mb": 1.0, "metrics": True}.items() <= options_of(model).items()
    x = torch.randn(3, 4)
    for call in (model, model.encode, model.encoder):
        accelerator.backward(call(x).square().mean())
        assert is_reduced(model), call
    with accelerator.no_sync(model):
        accelerator.backward(model(x).square().mean())
        first, second = model(x).square().mean(), model(x).sum()
    assert not is_reduced(model)
    accelerator.backward(first)  # of a forward under no_sync()
    assert not is_reduced(model)
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(second)
    assert is_reduced(model)
    for is_last in (False, True):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            assert is_reduced(model) is is_last
            optimizer.step()
    assert accelerator.unwrap_model(model) is model
    assert accelerator.unwrap_model(model, keep_torch_compile=False) is model
    assert accelerator.get_state_dict(model).keys() == Network().state_dict().keys()
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    accelerator.save_state(folder[0])
    accelerator.wait_for_everyone()
    weight = model.head.weight.detach().clone()
    nn.init.zeros_(model.head.weight)
    accelerator.load_state(folder[0])
    assert torch.equal(model.head.weight, weight)
    # A copy is a plain module, and Accelerate's mark on it must not keep it one.
    average = copy.deepcopy(model)
    assert type(average) is Network
    assert accelerator.prepare(average) is average
    assert tritonddp.ddp(average) is not tritonddp.ddp(model)
    assert accelerator.prepare(model) is model  # again
    accelerator.free_memory()
    assert accelerator.prepare(model) is model
    accelerator.backward(model(x).square().mean())
    assert is_reduced(model)


def options_of(model: nn.Module) -> dict[str, Any]:
    wrapper = tritonddp.ddp(model)
    return {"bucket_cap_mb": wrapper.bucket_bytes_cap / 2**20, "metrics": bool(model.metrics())}


def with_lightning() -> None:
    try:
        from lightning.pytorch import LightningModule, Trainer
    except ImportError:
        from pytorch_lightning import LightningModule, Trainer

    from tritonddp.integrations.lightning import TritonDDPStrategy

    reduced = []

    class Classifier(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = Network()
            self.automatic_optimization = False

        def training_step(self, batch: Any, number: int) -> None:
            optimizer = self.optimizers()
            for call in (self.network, self.network.encode):
                optimizer.zero_grad()
                self.manual_backward(call(batch[0]).square().mean())
                optimizer.step()
                reduced.append(is_reduced(self))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit(module: nn.Module, **options: Any) -> Tensor:
        reduced.clear()
        strategy = TritonDDPStrategy(**options)
        trainer = Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=dist.get_world_size() if dist.is_initialized() else 2,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        torch.manual_seed(1)
        trainer.fit(module, inputs())
        assert reduced
        assert all(reduced)
        return torch.cat([param.detach().flatten() for param in module.parameters()])

    found = []
    for in_place in (False, True):
        torch.manual_seed(0)
        module = Classifier()
        found.append(fit(module, in_place=in_place, bucket_cap_mb=1))
    assert torch.equal(*found)
    assert type(module).__name__ == "Classifier"
    assert module.state_dict().keys() == Classifier().state_dict().keys()
    fit(module, in_place=True)  # goes on with what is there
    fit(module, in_place=True, bucket_cap_mb=1)
    with pytest.raises(ValueError, match="already, and not with the options bucket_cap_mb"):
        fit(module, in_place=True, bucket_cap_mb=2)


def with_fabric() -> None:
    try:
        from lightning.fabric import Fabric
    except ImportError:
        from lightning_fabric import Fabric

    from tritonddp.integrations.fabric import TritonDDPStrategy

    strategy = TritonDDPStrategy(in_place=True, bucket_cap_mb=1)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    module = Network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer = fabric.setup(module, optimizer)
    assert model.module is module
    assert tritonddp.ddp(module).module is module
    x = torch.randn(3, 4)
    for call in (model, model.encode, model.encoder):
        fabric.backward(call(x).square().mean())
        assert is_reduced(module), call
    with fabric.no_backward_sync(model):
        fabric.backward(model(x).square().mean())
    assert not is_reduced(module)
    with fabric.no_backward_sync(model, enabled=False):
        fabric.backward(model(x).square().mean())
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    assert is_reduced(module)
    assert model.state_dict().keys() == Network().state_dict().keys()
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    weight = module.head.weight.detach().clone()
    fabric.save(f"{folder[0]}/state", {"model": model})
    nn.init.zeros_(module.head.weight)
    fabric.load(f"{folder[0]}/state", {"model": model})
    assert torch.equal(module.head.weight, weight)
    again = fabric.setup_module(module)
    fabric.backward(again(x).square().mean())
    assert is_reduced(module)


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    torch.manual_seed(int(os.environ["RANK"]))
    {"accelerate": with_accelerate, "lightning": with_lightning, "fabric": with_fabric}[
        sys.argv[1]
    ]()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # as in tests/clients/client.py


if __name__ == "__main__":
    main()
