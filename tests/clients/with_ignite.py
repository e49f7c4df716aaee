"""PyTorch-Ignite: ``idist.auto_model`` wraps, an Engine trains."""

from typing import Any

import torch
import torch.nn.functional as F
from client import Client, images
from torch.utils.data import TensorDataset


def main() -> None:
    client = Client()
    client.replace_stock()
    import ignite.distributed as idist
    from ignite.engine import Engine, Events
    from ignite.handlers import EMAHandler
    from ignite.metrics import Accuracy, RunningAverage

    idist.initialize("gloo")
    network = client.network()
    # (Replicated, it is on its device already: auto_model() would put a wrapper around it.)
    model = client.wrap(network) if client.in_place else idist.auto_model(network)
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    loader = idist.auto_dataloader(TensorDataset(*images(16 * 10)), batch_size=16, shuffle=True)

    def step(engine: Any, batch: Any) -> Any:
        model.train()
        inputs, labels = batch
        logits = model(inputs)
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"loss": loss.item(), "y_pred": logits.detach(), "y": labels}

    trainer = Engine(step)
    ema = EMAHandler(model, momentum=0.1)
    ema.attach(trainer, name="momentum", event=Events.ITERATION_COMPLETED)
    RunningAverage(output_transform=lambda output: output["loss"]).attach(trainer, "loss")
    Accuracy(lambda output: (output["y_pred"], output["y"])).attach(trainer, "accuracy")
    trainer.add_event_handler(Events.ITERATION_COMPLETED, client.step_ended)
    trainer.run(loader, max_epochs=2)
    client.report(
        model,
        network,
        metrics=[trainer.state.metrics["loss"], trainer.state.metrics["accuracy"]],
        average=ema.ema_model.state_dict()["6.weight"].double().sum().item(),
    )


if __name__ == "__main__":
    main()
