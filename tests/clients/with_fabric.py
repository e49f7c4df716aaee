"""Lightning Fabric: a loop of one's own, with accumulation by ``no_backward_sync``."""

import torch
import torch.nn.functional as F
from client import Client, images
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    client = Client()
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    strategy = DDPStrategy()
    if client.triton:
        from tritonddp.integrations.fabric import TritonDDPStrategy

        strategy = TritonDDPStrategy()
    fabric = Fabric(
        accelerator="cpu", devices=client.world_size, strategy=strategy, precision="bf16-mixed"
    )
    fabric.launch()
    module = client.network()
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=1e-3))
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(*images(16 * 24)), 8, shuffle=True))
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


if __name__ == "__main__":
    main()
