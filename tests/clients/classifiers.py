"""Libraries that train the classifier of images: loops of the user, then trainers of the library.

Each imports its library itself, after ``client.replace_stock()`` where that is needed.
"""

import os
import tempfile
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from client import Client, images
from torch import Tensor
from torch.utils.data import DataLoader


def with_accelerate(client: Client) -> None:
    """``accumulate``, clipping, the state saved and loaded."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    if client.triton:
        from tritonddp.integrations.accelerate import use_tritonddp

        use_tritonddp(accelerator)
    module = client.network()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
    loader = DataLoader(images(16 * 24), 8, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(module, optimizer, loader, schedule)
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(inputs), labels))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        client.step_ended()
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)
        accelerator.save_state(folders[0])
        accelerator.wait_for_everyone()
        with torch.no_grad():
            module[0].weight.zero_()
        accelerator.load_state(folders[0])
        accelerator.wait_for_everyone()
    client.report(model, accelerator.unwrap_model(model))


def with_fabric(client: Client) -> None:
    """Lightning Fabric: a loop of the user, with accumulation by ``no_backward_sync``."""
    from lightning.fabric import Fabric

    strategy: Any = "ddp"
    if client.triton:
        from tritonddp.integrations.fabric import TritonDDPStrategy

        strategy = TritonDDPStrategy()
    ranks = client.world_size
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy, precision="bf16-mixed")
    fabric.launch()
    module = client.network()
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=1e-3))
    loader = fabric.setup_dataloaders(DataLoader(images(16 * 24), 8, shuffle=True))
    for number, (inputs, labels) in enumerate(loader):
        accumulating = number % 2 == 0
        with fabric.no_backward_sync(model, enabled=accumulating):
            fabric.backward(F.cross_entropy(model(inputs), labels) / 2)
        if not accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            client.step_ended()
    client.report(model._forward_module, model.module)


def with_timm(client: Client) -> None:
    """The task, averaged model and distributed helpers, as in train.py."""
    client.replace_stock()
    from timm import utils
    from timm.loss import LabelSmoothingCrossEntropy
    from timm.task import ClassificationTask

    client.init_process_group()
    module = client.network()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    averaged = utils.ModelEmaV3(module, decay=0.9)
    task = ClassificationTask(module, LabelSmoothingCrossEntropy(0.1))
    if client.in_place:
        model = client.wrap(module, broadcast_buffers=False)
    else:
        task.prepare_distributed(broadcast_buffers=False)
        model = task.trainable_module
    for step, (inputs, labels) in enumerate(client.batches()):
        loss = task(inputs, labels)["loss"]
        optimizer.zero_grad()
        loss.backward()
        utils.dispatch_clip_grad(model.parameters(), value=1.0, mode="norm")
        optimizer.step()
        averaged.update(model, step=step)
    utils.distribute_bn(model, client.world_size, reduce=True)
    average = torch.cat([param.flatten() for param in averaged.module.parameters()])
    client.report(model, module, average=average.double().sum().item(), loss=loss.item())


def with_torchft(client: Client) -> None:
    """Each process is a replica, whose Manager averages through a hook."""
    client.replace_stock()
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.process_group import ProcessGroupDummy

    client.init_process_group()  # for the report alone
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2) if client.rank == 0 else None
    addresses = [lighthouse.address() if lighthouse else ""]
    dist.broadcast_object_list(addresses)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name)  # of torchrun: the Manager has another store
    module = client.network()
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        min_replica_size=2,
        load_state_dict=lambda state: module.load_state_dict(state),
        state_dict=lambda: module.state_dict(),
        replica_id=f"replica_{client.rank}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=addresses[0],
        timeout=timedelta(seconds=30),
    )
    if client.in_place:  # what the constructor of torchft's class does
        import tritonddp

        group = ProcessGroupDummy(0, 1)
        model = client.wrap(module, process_group=group, find_unused_parameters=True)
        hook = DistributedDataParallel._comm_hook
        tritonddp.ddp(model).register_comm_hook(manager, hook)
    else:
        model = DistributedDataParallel(manager, module)
    optimizer = Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    for inputs, labels in client.batches():
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    committed = manager.current_step()
    dist.barrier()
    manager.shutdown(wait=False)
    dist.barrier()
    if lighthouse is not None:
        lighthouse.shutdown()
    client.report(model, module, committed=committed)


def with_ignite(client: Client) -> None:
    """``idist.auto_model`` wraps, an Engine trains."""
    client.replace_stock()
    import ignite.distributed as idist
    from ignite.engine import Engine, Events
    from ignite.handlers import EMAHandler

    idist.initialize("gloo")
    network = client.network()
    # A replicated model is on its device already: auto_model() would wrap it.
    model = client.wrap(network) if client.in_place else idist.auto_model(network)
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    loader = idist.auto_dataloader(images(16 * 10), batch_size=16, shuffle=True)

    def step(engine: Any, batch: Any) -> Any:
        model.train()
        inputs, labels = batch
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    trainer = Engine(step)
    ema = EMAHandler(model, momentum=0.1)
    ema.attach(trainer, name="momentum", event=Events.ITERATION_COMPLETED)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, client.step_ended)
    trainer.run(loader, max_epochs=2)
    average = ema.ema_model.state_dict()["6.weight"].double().sum().item()
    client.report(model, network, average=average)


def with_mmengine(client: Client) -> None:
    """Runner, whose optimizer wrapper accumulates the gradients of eight batches."""
    client.replace_stock()
    from mmengine.hooks import Hook
    from mmengine.model import BaseModel
    from mmengine.registry import MODEL_WRAPPERS
    from mmengine.runner import Runner

    microbatches = 8

    class Classifier(BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.network = client.network()

        def forward(self, inputs: Tensor, labels: Tensor, mode: str = "tensor") -> Any:
            logits = self.network(inputs)
            return {"loss": F.cross_entropy(logits, labels)} if mode == "loss" else logits

    class AfterEachStep(Hook):
        def after_train_iter(self, runner: Any, batch_idx: int, *_: Any, **__: Any) -> None:
            if (batch_idx + 1) % microbatches == 0:
                client.step_ended()

    client.init_process_group()  # MMEngine's own needs a GPU
    # The options of Runner itself, except `device_ids`, which a model on the CPU must not have.
    wrapper = {"device_ids": None, "broadcast_buffers": False, "find_unused_parameters": False}
    if client.in_place:

        @MODEL_WRAPPERS.register_module()
        class Replicated:
            """A class for Runner that returns the module itself."""

            def __new__(cls, **options: Any) -> Any:
                return client.wrap(**options)

        wrapper = {**wrapper, "type": "Replicated"}
    classifier = Classifier()
    dataset = images(16 * microbatches * 8)
    sampler = torch.utils.data.DistributedSampler(dataset, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(
            model=classifier,
            work_dir=folder,
            train_dataloader=DataLoader(dataset, 4, sampler=sampler),
            train_cfg={"by_epoch": True, "max_epochs": 1},
            optim_wrapper={
                "type": "OptimWrapper",
                "optimizer": {"type": "AdamW", "lr": 1e-3},
                "accumulative_counts": microbatches,
                "clip_grad": {"max_norm": 1.0},
            },
            cfg={"model_wrapper_cfg": wrapper},
            custom_hooks=[AfterEachStep()],
            default_hooks={"checkpoint": None, "logger": None},
            launcher="pytorch",
            log_level="ERROR",
            randomness={"seed": 0},
        )
        runner.train()
    client.report(runner.model, classifier)


def with_fastai(client: Client) -> None:
    """``distrib_ctx`` wraps through Accelerate, and fastai patches torch's class."""
    client.replace_stock()
    from fastai.callback.core import Callback
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from fastai.distributed import DistributedDL
    from fastai.learner import Learner
    from fastai.losses import CrossEntropyLossFlat

    class AfterEachStep(Callback):
        def after_step(self) -> None:
            self.learn.reset_result = self.learn.model.reset()  # a patch of fastai
            self.learn.wrapper = self.learn.model
            client.step_ended()

    def broadcast(self: Any, values: Any, rank: int) -> Any:
        sent = torch.tensor(values)  # fastai's own puts it on a GPU
        dist.broadcast(sent, rank)
        return sent.tolist()

    DistributedDL._broadcast = broadcast
    client.init_process_group()
    training = DataLoader(images(16 * 16), bs=16, shuffle=True, num_workers=0)
    held_out = DataLoader(images(16), bs=16, num_workers=0)
    loaders = DataLoaders(training, held_out, device=torch.device("cpu"))
    options = {"loss_func": CrossEntropyLossFlat(), "lr": 1e-3, "cbs": [AfterEachStep()]}
    learner = Learner(loaders, client.network(), **options)
    learner.remove_cbs([callback for callback in learner.cbs if callback.name == "progress"])
    with learner.no_logging(), learner.distrib_ctx(sync_bn=False, cpu=True):
        learner.fit(2)
    client.report(learner.wrapper, learner.model)
