"""timm: its task, optimizer, scheduler, averaged model and distributed helpers, as train.py has."""

import torch
from client import Client, images


def main() -> None:
    client = Client()
    client.replace_stock()
    from timm.loss import LabelSmoothingCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler
    from timm.task import ClassificationTask
    from timm.utils import (
        AverageMeter,
        ModelEmaV3,
        accuracy,
        dispatch_clip_grad,
        distribute_bn,
        reduce_tensor,
    )

    client.init_process_group()
    module = client.network()
    optimizer = create_optimizer_v2(module, opt="lamb", lr=1e-2, weight_decay=0.02)
    averaged = ModelEmaV3(module, decay=0.9)
    task = ClassificationTask(module, LabelSmoothingCrossEntropy(0.1))
    if client.in_place:
        model = client.wrap(module, broadcast_buffers=False)
    else:
        task.prepare_distributed(broadcast_buffers=False)
        model = task.trainable_module
    schedule = CosineLRScheduler(optimizer, t_initial=16, warmup_t=4, t_in_epochs=False)
    top1 = AverageMeter()
    inputs, labels = images(16 * 16)
    for step, (x, y) in enumerate(zip(inputs.split(16), labels.split(16), strict=True)):
        x, y = x[client.rank :: client.world_size], y[client.rank :: client.world_size]
        result = task(x, y)
        loss, output = result["loss"], result["output"]
        optimizer.zero_grad()
        loss.backward()
        dispatch_clip_grad(model.parameters(), value=1.0, mode="norm")
        optimizer.step()
        averaged.update(model, step=step)
        schedule.step_update(num_updates=step)
        top1.update(reduce_tensor(accuracy(output.detach(), y)[0], client.world_size).item())
        client.step_ended()
    distribute_bn(model, client.world_size, reduce=True)
    average = torch.cat([param.flatten() for param in averaged.module.parameters()])
    client.report(
        model, module, average=average.double().sum().item(), top1=top1.avg, loss=loss.item()
    )


if __name__ == "__main__":
    main()
