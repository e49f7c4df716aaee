"""Accelerate: ``accumulate``, clipping, gathered metrics, the state saved and loaded."""

import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from client import Client, images
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    client = Client()
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    if client.triton:
        from tritonddp.integrations.accelerate import use_tritonddp

        use_tritonddp(accelerator)
    module = client.network()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
    loader = DataLoader(TensorDataset(*images(16 * 24)), 8, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(module, optimizer, loader, schedule)
    right = 0
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            logits = model(inputs)
            accelerator.backward(F.cross_entropy(logits, labels))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        found, wanted = accelerator.gather_for_metrics((logits.argmax(1), labels))
        right += (found == wanted).sum().item()
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
    client.report(model, accelerator.unwrap_model(model), right=right)


if __name__ == "__main__":
    main()
