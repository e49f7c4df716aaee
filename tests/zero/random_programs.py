"""Random programs with owners, beside the plain optimizer.

python tests/zero/random_programs.py --seed 12 --world 2 -v    one, with all it does
python tests/zero/random_programs.py --count 300 --world 3     many
"""

import argparse
import random
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    here = Path(__file__).resolve()
    sys.path[:0] = [str(here.parents[1]), str(here.parent), str(here.parents[2])]

import torch
import torch.distributed as dist
from beside_replicated import Pair
from distributed import run_ranks
from modules import Layers
from torch import nn
from training import drawn

NAMES = "abcde"
# Momentum is linear in the gradients: rounding grows slowly.
CLASSES: list[Any] = [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.SGD, {})]


def program_of(seed: int, world: int) -> dict[str, Any]:
    """What to do, the same on all ranks; in ``used`` there is an entry for each rank."""
    draw = random.Random(seed)
    steps: list[dict[str, Any]] = []
    for _ in range(draw.randint(4, 9)):
        backwards = []
        for _ in range(draw.choice([1, 1, 1, 2, 3])):
            same = "".join(draw.sample(NAMES, draw.randint(1, 5)))
            differs = draw.random() < 0.3
            used = [
                "".join(draw.sample(NAMES, draw.randint(1, 5))) if differs else same
                for _ in range(world)
            ]
            backwards.append({"used": used, "local": draw.random() < 0.5})
        if draw.random() < 0.9:
            backwards[-1]["local"] = False
        steps.append(
            {
                "backwards": backwards,
                "freeze": draw.choice([None, None, None, draw.choice(NAMES)]),
                "zero": draw.choice(["none", "none", "zeros", "not", "before last"]),
                "clip": draw.choice([None, None, "torch", "inf", "part", "wrapper"]),
                "lr": draw.choice([None, None, 0.02]),
                "writes": draw.random() < 0.1,
                "skips": draw.random() < 0.1,
            }
        )
    return {
        "seed": seed,
        "wrapper": {
            "find_unused_parameters": True,
            "gradient_as_bucket_view": draw.random() < 0.5,
            "transport": draw.choice(["auto", "process_group"]),
            "bucket_cap_mb": draw.choice([25, 3e-4]),
        },
        "class": draw.randrange(len(CLASSES)),
        "groups": draw.choice(["all", "two", "some"]),
        "late group": draw.choice([None, None, 2]),
        "frozen": draw.choice([None, None, draw.choice(NAMES)]),
        "steps": steps,
    }


def play(program: dict[str, Any]) -> str:
    """Run it on this rank; what differs, or ``""``."""
    torch.manual_seed(program["seed"])
    module = Layers(NAMES, 6)
    if program["frozen"]:
        module.layers[program["frozen"]].requires_grad_(False)
    kind, options = CLASSES[program["class"]]
    late = program["late group"]

    def params(net: nn.Module) -> Any:
        layers = [list(each.parameters()) for each in net.module.layers.values()]
        if late is not None:
            layers = layers[:-1]
        if program["groups"] == "all":
            return [p for each in layers for p in each]
        if program["groups"] == "two":
            return [
                {"params": layers[0], "lr": 0.01},
                {"params": [p for each in layers[1:] for p in each]},
            ]
        return [p for each in layers[1:] for p in each]

    pair = Pair(
        module, kind, params=params, wrapper=program["wrapper"],
        tolerance={"rtol": 1e-3, "atol": 1e-5}, **{**options, "lr": 0.03},
    )  # fmt: skip
    rank = dist.get_rank()
    for number, step in enumerate(program["steps"]):
        for net, optimizer in pair.each():
            if late == number:
                optimizer.add_param_group({"params": list(net.module.layers["e"].parameters())})
            if step["freeze"]:
                layer = net.module.layers[step["freeze"]]
                layer.requires_grad_(not layer.weight.requires_grad)
            for place, backward in enumerate(step["backwards"]):
                if step["zero"] == "before last" and place == len(step["backwards"]) - 1:
                    net.zero_grad()
                x = drawn(3, 6, step=100 * number + place)
                trained = net.module.layers.items()
                if not any(each.weight.requires_grad for _, each in trained):
                    continue
                used = backward["used"][rank]
                if not all(
                    any(net.module.layers[n].weight.requires_grad for n in one)
                    for one in backward["used"]
                ):
                    used = NAMES
                if backward["local"]:
                    with net.no_sync():
                        net(x, used).square().sum().backward()
                else:
                    net(x, used).square().sum().backward()
            ends_local = step["backwards"][-1]["local"]
            if ends_local:  # values of ranks would differ, as without owners
                net.zero_grad()
                continue
            mine = [p for group in optimizer.param_groups for p in group["params"]]
            if step["clip"] == "torch":
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            elif step["clip"] == "inf":
                nn.utils.clip_grad_norm_(mine, 0.2, float("inf"))
            elif step["clip"] == "part":
                nn.utils.clip_grad_norm_(mine[:2], 0.1)
            elif step["clip"] == "wrapper":
                net.clip_grad_norm_(0.5)
            if step["lr"]:
                optimizer.param_groups[0]["lr"] = step["lr"]
            if not step["skips"]:
                optimizer.step()
            if step["writes"]:
                with torch.no_grad():
                    net.module.layers["b"].weight.mul_(0.9)
            if step["zero"] in ("none", "zeros"):
                net.zero_grad(set_to_none=step["zero"] == "none")
        try:
            pair.check(f"step {number}")
        except AssertionError as error:
            return f"step {number}: {error}"
    return ""


def play_all(programs: list[dict[str, Any]]) -> list[str]:
    """Those of one batch, one after the other."""
    found = []
    for each in programs:
        try:
            found.append(play(each))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("-v", action="store_true")
    arguments = parser.parse_args()
    failed = []
    for first in range(arguments.seed, arguments.seed + arguments.count, 10):
        last = min(first + 10, arguments.seed + arguments.count)
        programs = [program_of(seed, arguments.world) for seed in range(first, last)]
        for each in programs if arguments.v else []:
            print(each)
        for seed, texts in zip(
            range(first, last),
            zip(*run_ranks(play_all, arguments.world, programs), strict=True),
            strict=True,
        ):
            if any(texts):
                failed.append(seed)
                print(f"seed {seed}: {next(filter(None, texts))[:300]}", flush=True)
    print(f"{arguments.count} programs on {arguments.world} ranks, {len(failed)} differ: {failed}")
    return bool(failed)


if __name__ == "__main__":
    import random_programs  # jobs name functions of this module, not of __main__

    sys.exit(random_programs.main())
