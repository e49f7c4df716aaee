"""MACE: a small potential, whose loss has forces: gradients inside the forward, of which there are
gradients again."""

import ase
import numpy as np
import torch
from client import Client


def main() -> None:
    client = Client()
    import mace  # noqa: F401  (before e3nn: it lets torch.load read its constants)
    from e3nn import o3
    from mace import data, modules, tools
    from mace.tools import torch_geometric
    from mace.tools.train import take_step

    client.init_process_group()
    table = tools.AtomicNumberTable([1, 8])
    module = client.altered(
        modules.ScaleShiftMACE(
            r_max=3.0,
            num_bessel=4,
            num_polynomial_cutoff=5,
            max_ell=1,
            interaction_cls=modules.interaction_classes["RealAgnosticResidualInteractionBlock"],
            interaction_cls_first=modules.interaction_classes["RealAgnosticInteractionBlock"],
            num_interactions=2,
            num_elements=len(table),
            hidden_irreps=o3.Irreps("8x0e + 8x1o"),
            MLP_irreps=o3.Irreps("8x0e"),
            gate=torch.nn.functional.silu,
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
    for _ in range(12):
        atoms = [water(data, table, random) for _ in range(4)]
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


def water(data, table, random):
    places = np.array([[0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0]]) + 0.1 * random.normal(
        size=(3, 3)
    )
    atoms = ase.Atoms("OH2", positions=places)
    atoms.info["REF_energy"], atoms.arrays["REF_forces"] = -5.0, random.normal(size=(3, 3))
    keys = data.KeySpecification(
        info_keys={"energy": "REF_energy"}, arrays_keys={"forces": "REF_forces"}
    )
    return data.AtomicData.from_config(
        data.config_from_atoms(atoms, key_specification=keys), z_table=table, cutoff=3.0
    )


if __name__ == "__main__":
    main()
