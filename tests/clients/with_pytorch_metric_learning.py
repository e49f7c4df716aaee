"""pytorch-metric-learning: a loss on the embeddings of all ranks, with a memory of earlier ones."""

import torch
from client import Client, images


def main() -> None:
    client = Client()
    from pytorch_metric_learning.losses import CrossBatchMemory, NTXentLoss
    from pytorch_metric_learning.miners import MultiSimilarityMiner
    from pytorch_metric_learning.utils.distributed import (
        DistributedLossWrapper,
        DistributedMinerWrapper,
    )

    client.init_process_group()
    network = client.network()
    model = client.wrap(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    memory = CrossBatchMemory(NTXentLoss(), embedding_size=10, memory_size=64)
    loss_of = DistributedLossWrapper(memory)
    miner = DistributedMinerWrapper(MultiSimilarityMiner())
    inputs, labels = images(16 * 32)
    for x, y in zip(inputs.split(32), labels.split(32), strict=True):
        x, y = x[client.rank :: client.world_size], y[client.rank :: client.world_size]
        embeddings = model(x)
        loss = loss_of(embeddings, y, miner(embeddings, y))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        client.step_ended()
    client.report(model, network, loss=loss.item())


if __name__ == "__main__":
    main()
