"""The origin of a result file: machine, versions, commit, date and load."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, not an installed version

import torch

import tritonddp
from tritonddp.cli.terminal import cpu_model


def describe() -> dict[str, Any]:
    """Return machine, versions, commit, date and load, ready for JSON.

    The load average is the current one: call this before and after the measurement.
    """
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": os.getloadavg(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _triton_version(),
        "torch_threads": torch.get_num_threads(),
        "gpu": _gpu(),
        "tritonddp": _source(),
    }


def summary(facts: dict[str, Any]) -> str:
    """Return the facts from :func:`describe` as two lines."""
    source, gpu = facts["tritonddp"], facts["gpu"]
    commit = (source["commit"] or "no git")[:10] + (" with changes" if source["dirty"] else "")
    device = f", {gpu['name']}" if gpu else ""
    load = " ".join(f"{value:.2f}" for value in facts["load_average"])
    return (
        f"{facts['cpu']}, {facts['usable_cores']} cores{device}, load average {load}\n"
        f"torch {facts['torch']}, triton {facts['triton']}, python {facts['python']}, "
        f"tritonddp {commit} from {source['path']}, {facts['date']}"
    )


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write ``content`` atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)


def _triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return triton.__version__


def _gpu() -> dict[str, Any] | None:
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "nccl": _nccl_version(),
    }


def _nccl_version() -> str | None:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except Exception:  # a build without it: benchmarks that do not need it can still run
        return None


def _source() -> dict[str, Any]:
    """Return which tritonddp was imported, and the state of its checkout."""
    folder = Path(tritonddp.__file__).parent
    commit = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--", ".")
    return {"path": str(folder), "commit": commit, "dirty": bool(changes) if commit else None}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


if __name__ == "__main__":
    facts = describe()
    print(summary(facts))
    print(json.dumps(facts))
