"""Libraries that bring a model of their own: MACE, OpenCLIP and torchao."""

import contextlib
import io
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from client import Client
from torch import Tensor, nn


def with_mace(client: Client) -> None:
    """A potential, whose loss has forces: second derivatives of the forward."""
    import ase
    import mace  # noqa: F401  (before e3nn: it lets torch.load read its constants)
    import numpy as np
    from e3nn import o3
    from mace import data, modules, tools
    from mace.tools import torch_geometric
    from mace.tools.train import take_step

    client.init_process_group()
    table = tools.AtomicNumberTable([1, 8])
    blocks = modules.interaction_classes
    module = client.altered(
        modules.ScaleShiftMACE(
            r_max=3.0,
            num_bessel=4,
            num_polynomial_cutoff=5,
            max_ell=1,
            interaction_cls=blocks["RealAgnosticResidualInteractionBlock"],
            interaction_cls_first=blocks["RealAgnosticInteractionBlock"],
            num_interactions=2,
            num_elements=len(table),
            hidden_irreps=o3.Irreps("8x0e + 8x1o"),
            MLP_irreps=o3.Irreps("8x0e"),
            gate=F.silu,
            atomic_energies=np.array([-1.0, -3.0]),
            avg_num_neighbors=2,
            atomic_numbers=table.zs,
            correlation=2,
            atomic_inter_scale=1.0,
            atomic_inter_shift=0.0,
        )
    )
    model = client.wrap(module)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, amsgrad=True)
    random = np.random.default_rng(1 + client.rank)
    keys = data.KeySpecification(
        info_keys={"energy": "REF_energy"}, arrays_keys={"forces": "REF_forces"}
    )

    def water():
        places = np.array([[0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0]])
        atoms = ase.Atoms("OH2", positions=places + 0.1 * random.normal(size=(3, 3)))
        atoms.info["REF_energy"], atoms.arrays["REF_forces"] = -5.0, random.normal(size=(3, 3))
        config = data.config_from_atoms(atoms, key_specification=keys)
        return data.AtomicData.from_config(config, z_table=table, cutoff=3.0)

    for _ in range(12):
        atoms = [water() for _ in range(4)]
        (batch,) = torch_geometric.dataloader.DataLoader(atoms, batch_size=4)
        loss, _ = take_step(
            model=model,
            loss_fn=modules.WeightedEnergyForcesLoss(energy_weight=1.0, forces_weight=10.0),
            batch=batch,
            optimizer=optimizer,
            ema=None,
            output_args={"forces": True, "virials": False, "stress": False},
            max_grad_norm=10.0,
            device=torch.device("cpu"),
        )
        client.step_ended()
    client.report(model, module, loss=loss.item())


def with_open_clip(client: Client) -> None:
    """A small CLIP, with the loss of its training script on the features of all ranks."""
    from open_clip import CLIP, ClipLoss
    from open_clip_train.train import unwrap_model

    client.init_process_group()
    size = {"width": 32, "layers": 2}
    module = client.altered(
        CLIP(
            16,
            vision_cfg={"image_size": 16, "patch_size": 8, "head_width": 16, **size},
            text_cfg={"context_length": 8, "vocab_size": 64, "heads": 2, **size},
            output_dict=True,
        )
    )
    module.set_grad_checkpointing()
    model = client.wrap(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_of = ClipLoss(
        local_loss=True, gather_with_grad=True, rank=client.rank, world_size=client.world_size
    )
    generator = torch.Generator().manual_seed(1 + client.rank)
    for _ in range(16):
        images = torch.randn(8, 3, 16, 16, generator=generator)
        texts = torch.randint(1, 64, (8, 8), generator=generator)
        loss = loss_of(**model(images, texts))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            unwrap_model(model).logit_scale.clamp_(0, 4.6)
        client.step_ended()
    client.report(model, module, loss=loss.item())


WIDTH, TOKENS = 256, 32


class Blocks(nn.Module):
    """Two blocks on embedded tokens: more than a first bucket holds, so stock splits graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, 4 * WIDTH),
                nn.GELU(),
                nn.Linear(4 * WIDTH, WIDTH),
            )
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def with_torchao(client: Client) -> None:
    """float8 linear layers, tensorwise and rowwise, in a compiled model that accumulates.

    Float8Linear calls torch._scaled_mm, which multiplies float8 tensors on a CPU too.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.optim import AdamW8bit

    client.init_process_group()
    module = client.altered(Blocks()).bfloat16()
    for block, recipe in zip(module.blocks, ("tensorwise", "rowwise"), strict=True):
        convert_to_float8_training(block, config=Float8LinearConfig.from_recipe_name(recipe))
    float8 = [name for name, each in module.named_modules() if "Float8" in type(each).__name__]
    wrapper = client.wrap(module)
    model = torch.compile(wrapper, backend="aot_eager")
    optimizer = AdamW8bit(module.parameters(), lr=1e-3)
    losses = []
    for step in range(12):
        for is_last in (False, True):
            # Each token determines the next one.
            first = torch.arange(client.rank, TOKENS, client.world_size) + step + is_last
            tokens = (first[:, None] + 5 * torch.arange(9)) % TOKENS
            with contextlib.nullcontext() if is_last else wrapper.no_sync():
                logits = model(tokens[:, :-1]).float()
                loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
                (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        client.step_ended()
    assert losses[-1] < losses[0] / 2, losses
    client.report(wrapper, module, losses=losses, float8=float8)


class Adapted(nn.Module):
    """A frozen linear layer with an adapter of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 64, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.base.weight) + self.up(self.down(x))


def adapted(kind: str) -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_, to_nf4

    net = nn.Sequential(Adapted(), nn.Tanh(), Adapted())
    for layer in (net[0].base, net[2].base):
        if kind == "int8":
            quantize_(layer, Int8WeightOnlyConfig())
        else:
            weight = to_nf4(layer.weight.detach(), block_size=32, scaler_block_size=2)
            layer.weight = nn.Parameter(weight, requires_grad=False)
    return net


def values(net: nn.Module) -> list[list[float]]:
    """Of all parameters: those of a quantized one as plain numbers."""
    frozen = [F.linear(torch.eye(64), layer.base.weight) for layer in (net[0], net[2])]
    trained = [param.detach() for param in net.parameters() if param.requires_grad]
    return [each.flatten().tolist() for each in (*frozen, *trained)]


def same_on_all_ranks(content: Any) -> bool:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, content)
    return all(each == found[0] for each in found)


def lora_on_torchao(client: Client) -> None:
    """A LoRA on frozen weights of torchao, int8 and NF4, which stock DDP cannot wrap."""
    client.init_process_group()
    rows = []
    for kind in ("int8", "nf4"):
        torch.manual_seed(client.rank)  # rank 0 sends its values
        net = adapted(kind)
        same = [same_on_all_ranks(values(net))]
        ddp: Any = client.wrap(net)
        same.append(same_on_all_ranks(values(net)))
        optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
        losses = []
        x = torch.randn(16, 64)
        for _ in range(20):
            optimizer.zero_grad()
            loss = (ddp(x) - x.flip(1)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        ddp.check_sync()
        same.append(same_on_all_ranks(values(net)))
        file = io.BytesIO()
        torch.save(net.state_dict(), file)
        file.seek(0)
        other = adapted(kind)
        other.load_state_dict(torch.load(file, weights_only=False), assign=True)
        is_loaded = values(other) == values(net)
        rows.append({"same": same, "learns": losses[-1] < losses[0], "loaded": is_loaded})
    client.finish({"rows": rows})
