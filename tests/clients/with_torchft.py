"""torchft: each process is a replica of its own, and its Manager averages through a hook."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from client import Client, images


def main() -> None:
    client = Client()
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
        os.environ.pop(name)  # torchrun's: the Manager has a store of its own
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

        model = client.wrap(
            module, process_group=ProcessGroupDummy(0, 1), find_unused_parameters=True
        )
        hook = DistributedDataParallel._comm_hook
        tritonddp.ddp(model).register_comm_hook(manager, hook)
    else:
        model = DistributedDataParallel(manager, module)
    optimizer = Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    inputs, labels = images(16 * 16)
    for x, y in zip(inputs.split(16), labels.split(16), strict=True):
        x, y = x[client.rank :: client.world_size], y[client.rank :: client.world_size]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        client.step_ended()
    committed = manager.current_step()
    dist.barrier()
    manager.shutdown(wait=False)
    dist.barrier()
    if lighthouse is not None:
        lighthouse.shutdown()
    client.report(model, module, committed=committed)


if __name__ == "__main__":
    main()
