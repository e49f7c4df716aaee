"""Opacus: a wrapped model is made private; its optimizer adds noise and averages over ranks."""

import torch
import torch.nn.functional as F
from client import Client, images
from torch import nn
from torch.nn.parallel import DistributedDataParallel as StockDDP
from torch.utils.data import DataLoader, TensorDataset

from tritonddp import DistributedDataParallel as TritonDDP


def main() -> None:
    client = Client()
    from opacus import PrivacyEngine

    client.init_process_group()
    layers = nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)
    module = client.altered(nn.Sequential(*layers))
    model = (TritonDDP if client.triton else StockDDP)(module)
    engine = PrivacyEngine(accountant="rdp")
    private, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(*images(16 * 16)), 16),
        noise_multiplier=0.5,
        max_grad_norm=1.0,
        poisson_sampling=False,
        noise_generator=torch.Generator().manual_seed(2),
    )
    for inputs, labels in loader:
        mine = slice(client.rank, None, client.world_size)
        optimizer.zero_grad()
        F.cross_entropy(private(inputs[mine]), labels[mine]).backward()
        optimizer.step()
        client.step_ended()
    client.report(private._module, module, optimizer=type(optimizer).__name__)


if __name__ == "__main__":
    main()
