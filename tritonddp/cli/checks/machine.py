"""Versions, the processors and their memory, the cards: of this machine, without a group."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import tritonddp
from tritonddp._torch import nvlinks
from tritonddp.cli.checks.report import Section, amount
from tritonddp.coordination.processes import usable_cores
from tritonddp.kernels.dispatch import select

# Seconds for nvidia-smi, which hangs where the driver is in trouble.
_PATIENCE = 10.0
_NODES = Path("/sys/devices/system/node")
_DRIVER = Path("/proc/driver/nvidia/version")


def versions(section: Section) -> None:
    """Fill the section about versions of the software."""
    section.fact("tritonddp", tritonddp.__version__)
    section.fact("Python", platform.python_version())
    section.look("torch", _torch_build)
    section.look("Triton", lambda: _triton(section))
    if torch.cuda.is_available():
        section.look("NCCL", lambda: ".".join(map(str, torch.cuda.nccl.version())))
    section.look("NVIDIA driver", _driver)
    system = platform.uname()
    section.fact("system", f"{system.system} {system.release} {system.machine}")
    if not torch.distributed.is_available():
        section.broken(
            "this torch was built without torch.distributed: install another build of it"
        )


def _torch_build() -> str:
    if torch.version.hip is not None:
        return f"{torch.__version__}, ROCm {torch.version.hip}"
    cuda = torch.version.cuda
    return f"{torch.__version__}, " + (f"CUDA {cuda}" if cuda else "for the CPU")


def _triton(section: Section) -> str:
    has_cards = torch.cuda.is_available()
    try:
        import triton
    except ImportError as error:
        if has_cards:
            section.broken(
                f"Triton cannot be imported ({error}), and kernels of a GPU are written in it: "
                "pip install 'triton>=3.6'"
            )
        return "not installed" + ("" if has_cards else "; only a GPU's kernels need it")
    if has_cards:
        try:
            select(torch.device("cuda"))
        except RuntimeError as error:
            section.broken(str(error))
    return str(triton.__version__)


def _driver() -> str | None:
    if not _DRIVER.exists():
        if shutil.which("nvidia-smi") is None:
            return None
        return _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
    text = _DRIVER.read_text()
    found = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\S+)", text)
    return found[1] if found else text.split("\n")[0]


def _nvidia_smi(*arguments: str) -> str:
    done = subprocess.run(
        ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=_PATIENCE, check=True
    )
    return done.stdout.strip()


def processors(section: Section) -> None:
    """Fill the section about processors and memory of the machine and of this process."""
    section.look("model", cpu_model)
    section.fact("cores", f"{os.cpu_count()}, of which this process may use {cores_with_time():g}")
    quota = cpu_quota()
    if quota is not None:
        section.fact("limit of the container", f"the time of {quota:.3g} cores")
    section.look("threads of torch", lambda: f"{torch.get_num_threads()} here")
    section.look("NUMA nodes", _numa_nodes)
    section.look("memory", _memory)
    load, usable = os.getloadavg()[0], cores_with_time()
    section.fact("load average", f"{load:.1f}")
    if load > usable:
        section.note(
            f"{load:.1f} processes want the {usable:g} cores already: what is measured here is "
            "slower than on a quiet machine"
        )


def cores_with_time() -> float:
    """Cores whose time this process can have: by its affinity, and by its container's quota."""
    return min(usable_cores(), cpu_quota() or float("inf"))


def cpu_quota() -> float | None:
    """Cores whose time the control group allows; ``None`` without a limit."""
    found = []
    for folder in _control_groups("cpu"):
        both = _read(folder, "cpu.max").split()
        quota, period = both or (_read(folder, f"cpu.cfs_{x}_us") for x in ("quota", "period"))
        if period and quota not in ("max", "-1"):
            found.append(int(quota) / int(period))
    return min(found, default=None)


def memory_limit() -> int | None:
    """Bytes that the control group allows to all of its processes; ``None`` without a limit."""
    found = []
    for folder in _control_groups("memory"):
        text = _read(folder, "memory.max") or _read(folder, "memory.limit_in_bytes")
        # The first version of control groups says "no limit" by a number of nearly 2^63.
        if text.isdecimal() and int(text) < 1 << 60:
            found.append(int(text))
    return min(found, default=None)


def memory_in_group() -> int:
    """Bytes that the control group has now, without files that can be dropped; 0 if not known."""
    for folder in _control_groups("memory"):
        used = _read(folder, "memory.current") or _read(folder, "memory.usage_in_bytes")
        if used:
            stat = dict(line.split() for line in _read(folder, "memory.stat").splitlines())
            cached = stat.get("total_inactive_file", stat.get("inactive_file", "0"))
            return max(0, int(used) - int(cached))
    return 0


def _read(folder: Path, name: str) -> str:
    """What is in a file of a control group; empty if there is none."""
    try:
        return (folder / name).read_text().strip()
    except OSError:
        return ""


def _control_groups(controller: str) -> Iterator[Path]:
    """Folders whose limits hold for this process, the innermost first, of both versions."""
    root = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        bases = [root / names] if names else [root, root / "unified"]
        for base in bases:
            folder = base / path.strip("/")
            while folder.is_relative_to(base):
                if folder.is_dir():  # not where a container shows its own group as the root
                    yield folder
                folder = folder.parent


def _meminfo(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    if found is None:
        raise OSError(f"/proc/meminfo has no {name}")
    return 1024 * int(found[1])


def _memory() -> str:
    return f"{amount(available_memory())} free of {amount(_meminfo('MemTotal'))}"


def available_memory() -> int:
    """Bytes that this process can still have: of the machine, and of its control group."""
    limit = memory_limit()
    free = _meminfo("MemAvailable")
    return free if limit is None else max(0, min(free, limit - memory_in_group()))


def cpu_model() -> str:
    """The model of the processor, or the name of the platform."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def numa_nodes() -> list[str]:
    """The cores of each NUMA node, as the kernel writes them; empty where it does not tell."""
    found = sorted(_NODES.glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    return [(path / "cpulist").read_text().strip() for path in found]


def _numa_nodes() -> str:
    nodes = numa_nodes()
    if len(nodes) < 2:
        return "1"
    return f"{len(nodes)}: " + "; ".join(f"node {n} cores {c}" for n, c in enumerate(nodes))


def cards(section: Section) -> None:
    """Fill the section about CUDA devices: names, memory, and links between them."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        section.fact("CUDA", "none that torch sees")
        if shutil.which("nvidia-smi") is not None:
            section.broken(
                "nvidia-smi is here, but torch sees no card: the driver is older than this torch "
                "wants, this torch is for the CPU, or CUDA_VISIBLE_DEVICES hides the cards"
            )
        return
    for index in range(count):
        section.look(f"cuda:{index}", lambda index=index: _card(index))  # type: ignore[misc]
    if count > 1:
        for index in range(count):
            section.look(f"links of cuda:{index}", lambda index=index: _links(index, count))  # type: ignore[misc]


def _card(index: int) -> str:
    properties: Any = torch.cuda.get_device_properties(index)
    bus = f"{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    address = f"{properties.pci_domain_id:04x}:{bus}"
    node = Path("/sys/bus/pci/devices", address, "numa_node")
    on = f", NUMA node {node.read_text().strip()}" if node.exists() else ""
    return (
        f"{properties.name}, {amount(properties.total_memory)}, compute capability "
        f"{properties.major}.{properties.minor}{on}"
    )


def _links(index: int, count: int) -> str:
    try:
        lines = nvlinks(torch.device("cuda", index))
    except (AttributeError, IndexError, RuntimeError):
        lines = []
    found = []
    for other in range(count):
        if other == index:
            continue
        reaches = torch.cuda.can_device_access_peer(index, other)
        number = lines[other] if other < len(lines) else 0
        how = f"NVLink x{number}" if number else "PCIe" if reaches else "through the host"
        found.append(f"cuda:{other} {how}")
    return ", ".join(found)
