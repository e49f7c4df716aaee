"""torchmetrics beside the training: metrics that are synchronized between forward and backward."""

import torch
import torch.nn.functional as F
from client import Client, images


def main() -> None:
    client = Client()
    from torchmetrics import MetricCollection
    from torchmetrics.aggregation import MeanMetric
    from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

    client.init_process_group()
    network = client.network()
    model = client.wrap(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    metrics = MetricCollection(
        {
            "accuracy": MulticlassAccuracy(10, dist_sync_on_step=True),
            "auroc": MulticlassAUROC(10, thresholds=16),
        }
    )
    mean = MeanMetric()
    inputs, labels = images(16 * 16)
    for x, y in zip(inputs.split(16), labels.split(16), strict=True):
        x, y = x[client.rank :: client.world_size], y[client.rank :: client.world_size]
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        metrics(logits.softmax(1).detach(), y)
        mean.update(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        client.step_ended()
    found = {name: value.item() for name, value in metrics.compute().items()}
    client.report(model, network, metrics=found, loss=mean.compute().item())


if __name__ == "__main__":
    main()
