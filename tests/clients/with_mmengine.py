"""MMEngine's Runner, whose optimizer's wrapper accumulates the gradients of eight batches."""

import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from client import Client, images
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

MICROBATCHES = 8
# What Runner itself says, but for `device_ids`, which a model on the CPU must not have.
WRAPPER = {"device_ids": None, "broadcast_buffers": False, "find_unused_parameters": False}


def main() -> None:
    client = Client()
    client.replace_stock()
    from mmengine.hooks import Hook
    from mmengine.model import BaseModel
    from mmengine.runner import Runner

    class Classifier(BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.network = client.network()

        def forward(self, inputs: Tensor, labels: Tensor, mode: str = "tensor") -> Any:
            logits = self.network(inputs)
            return {"loss": F.cross_entropy(logits, labels)} if mode == "loss" else logits

    class AfterEachStep(Hook):
        def after_train_iter(self, runner: Any, batch_idx: int, *_: Any, **__: Any) -> None:
            if (batch_idx + 1) % MICROBATCHES == 0:
                client.step_ended()

    client.init_process_group()  # MMEngine's own wants a GPU
    wrapper = WRAPPER
    if client.in_place:
        from mmengine.registry import MODEL_WRAPPERS

        @MODEL_WRAPPERS.register_module()
        class Replicated:
            """What Runner takes for the class of a wrapper; it gives back the module itself."""

            def __new__(cls, **options: Any) -> Any:
                return client.wrap(**options)

        wrapper = {**WRAPPER, "type": "Replicated"}
    classifier = Classifier()
    dataset = TensorDataset(*images(16 * MICROBATCHES * 8))
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
                "accumulative_counts": MICROBATCHES,
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


if __name__ == "__main__":
    main()
