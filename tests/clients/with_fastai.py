"""fastai: ``distrib_ctx`` wraps through Accelerate, and patches torch's class."""

from typing import Any

import torch
import torch.distributed as dist
from client import Client, images
from torch.utils.data import TensorDataset


def main() -> None:
    client = Client()
    client.replace_stock()
    from fastai.callback.core import Callback
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from fastai.distributed import DistributedDL
    from fastai.learner import Learner
    from fastai.losses import CrossEntropyLossFlat

    class AfterEachStep(Callback):
        def after_step(self) -> None:
            self.learn.reset_result = self.learn.model.reset()  # what fastai has patched in
            self.learn.wrapper = self.learn.model
            client.step_ended()

    def broadcast(self: Any, values: Any, rank: int) -> Any:
        sent = torch.tensor(values)  # fastai's own puts it on a GPU
        dist.broadcast(sent, rank)
        return sent.tolist()

    DistributedDL._broadcast = broadcast
    client.init_process_group()
    training, held_out = (TensorDataset(*images(16 * count)) for count in (16, 1))
    loaders = DataLoaders(
        DataLoader(training, bs=16, shuffle=True, num_workers=0),
        DataLoader(held_out, bs=16, num_workers=0),
        device=torch.device("cpu"),
    )
    learner = Learner(
        loaders, client.network(), loss_func=CrossEntropyLossFlat(), lr=1e-3, cbs=[AfterEachStep()]
    )
    learner.remove_cbs([callback for callback in learner.cbs if callback.name == "progress"])
    with learner.no_logging(), learner.distrib_ctx(sync_bn=False, cpu=True):
        learner.fit(2)
    client.report(learner.wrapper, learner.model)


if __name__ == "__main__":
    main()
