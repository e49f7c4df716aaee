"""Lines of the package that no test on a machine without a GPU executes, and why.

    python tests/project/unreached.py [arguments of pytest]     or: make coverage

runs the tests under coverage.py, in all processes that they start, and prints which lines none of
them has executed and :data:`UNREACHED` does not name, and which of its entries tests do reach. It
takes a quarter of an hour. ``test_unreached.py`` looks in each run whether what is named is there.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tritonddp"

# Reasons that several lines have.
GPU = "a CUDA device; tests/gpu"
COMPILED = (
    "code of a kernel for GPUs, not for the interpreter; compiled in tests/aot, run in tests/gpu"
)
ENGINE = (
    "runs in threads of torch's distributed engine, which coverage.py sees from Python 3.12 on; "
    "tests/reducer/test_distributed_autograd.py"
)
GUARD = "a guard: no way is known to get there"

# By file: the first line of a statement, a function for example, which is meant with all that is in
# it; and the reason.
UNREACHED: dict[str, dict[str, str]] = {
    "_device.py": {"each.event.synchronize()": GPU},
    "_torch.py": {
        "raise": "torch raises nothing else there, as far as is known: it goes on",
        "def gradients_in_context(context: int) -> dict[Tensor, Tensor]:": ENGINE,
        "def put_into_context(context: int, param: Tensor, gradient: Tensor) -> None:": ENGINE,
        "def _put() -> Any:": ENGINE,
        "raise NotImplementedError": "the one class that inherits it overrides it",
    },
    "buckets/bucket.py": {
        "raise": "what else torch raises in a kernel, as for want of memory: it goes on",
        "if grad.shape != param.shape or grad.dtype != param.dtype:": (
            "torch checks the same before, when a gradient is accumulated or assigned"
        ),
    },
    "buckets/parameters.py": {
        "raise RuntimeError(": "verify_same, before it, raises wherever a hash can have differed",
    },
    "buckets/residuals.py": {
        "if quantization is None or quantization.residuals is None:": (
            "a parameter of a loaded state is quantised no more: its dtype is another one now"
        ),
    },
    "buckets/view_bucket.py": {
        "if self.flat is None:": "a lazy bucket between two backwards: at a renewal it has a buffer",
    },
    "comm/all_reduce.py": {
        "except RuntimeError as error:": "a connection that breaks within an exchange of rows",
    },
    "comm/grad_bucket.py": {
        "if bucket.flat is None:": "the hook of a lazy bucket that has come to nothing: " + GUARD,
    },
    "comm/quantized.py": {
        "except RuntimeError as error:": "NCCL, that refuses a collective at once; gloo is in a thread",
        "for thread, (_, reference) in threads:": (
            "at the end of a process; those of the tests are ended before that"
        ),
    },
    "comm/run.py": {
        "if bucket.index in self.skipped:": "a bucket that is left out of a backward that breaks off",
    },
    "compat/stock_ddp.py": {
        "return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)": GPU + ", several of them",
        "return gather(outputs, output_device, dim=self.dim)": GPU + ", several of them",
    },
    "config.py": {
        "devices.insert(0, device)": GPU,
        "given = device_ids[0] if isinstance(device_ids, list) and device_ids else None": GPU,
        "if not isinstance(given, int) or given < 0:": GPU,
        'devices.append(torch.device("cuda", given))': GPU,
        "if not dist.is_available():": "a build of torch without torch.distributed",
        "ids = [_device_index(device_ids[0])]": GPU,
        "return ids, ids[0] if output_device is None else _device_index(output_device)": GPU,
        "def _device_index(device: int | str | torch.device) -> int:": GPU,
    },
    "coordination/processes.py": {"except OSError:": "a system without /proc, such as macOS"},
    "ddp.py": {"if self.device_ids:": GPU},
    "diagnostics/trace.py": {"if len(devices) > 1:": GPU + ", several of them"},
    "features/auto_compression/planner.py": {
        "if backward is None:": "no rank has timed a backward since it began: all have joined early",
        "if self._running is None:": "a backward that is not timed, as under no_sync",
    },
    "features/auto_compression/probe.py": {
        "if kind is Kind.ALL_TO_ALL:": GPU,
        "return lambda: _wait([all_gather_single(whole, other[:part], self._group)])": GPU,
        "settle(device)": GPU + ", or several threads; one_card's ranks have one",
        "return time.perf_counter()": GPU + ", or several threads",
        'return float("inf")': GPU,
    },
    "features/join.py": {},
    "features/weighted_mean.py": {},
    "integrations/fabric.py": {
        "class TritonDDPStrategy(_Base):": "needs lightning; make test-clients",
    },
    "kernels/flatten.py": {"elif x.dtype == tl.bfloat16:": COMPILED},
    "kernels/quantized/blocks.py": {},
    "reducer/capture.py": {
        "if manager.planner is not None:": (
            "compression=\"auto\" on a GPU: the recorded device would time kernels for minutes"
        ),
    },
    "reducer/in_context.py": {},
}


def statements(name: str) -> Iterator[tuple[str, range]]:
    """First line, stripped, and the numbers of all lines of each statement of a file."""
    source = (PACKAGE / name).read_text()
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt | ast.excepthandler):
            last = node.body[-1].end_lineno if isinstance(node, ast.If) else node.end_lineno
            yield lines[node.lineno - 1].strip(), range(node.lineno, (last or node.lineno) + 1)


def named() -> dict[str, dict[str, list[range]]]:
    """By file and text of :data:`UNREACHED`: the lines of each statement that begins so."""
    found: dict[str, dict[str, list[range]]] = {}
    for name, reasons in UNREACHED.items():
        spans = list(statements(name)) if (PACKAGE / name).is_file() else []
        found[name] = {text: [at for first, at in spans if first == text] for text in reasons}
    return found


def measure(folder: Path, arguments: list[str]) -> dict[str, list[int]]:
    """Run the tests; returns the lines that none has executed, by file, and prints how many."""
    settings = folder / "coveragerc"
    settings.write_text(
        f"[run]\ndata_file = {folder}/data\nparallel = true\nsource_pkgs = tritonddp\n"
        "core = ctrace\npatch = _exit\n"
    )
    # coverage.py, where it is installed, begins in each process that finds this variable.
    environment = {**os.environ, "COVERAGE_PROCESS_START": str(settings), "OMP_NUM_THREADS": "1"}
    wanted = arguments or ["-n", "2", "--dist", "loadfile"]
    marks = ["-m", "not gpu and not thorough and not clients"]
    tests = [sys.executable, "-m", "pytest", "-q", *marks, *wanted]
    subprocess.run(tests, cwd=ROOT, env=environment, check=False)
    for step in (["combine", "--quiet"], ["json", "--quiet", "-o", f"{folder}/lines.json"]):
        command = [sys.executable, "-m", "coverage", *step, f"--rcfile={settings}"]
        subprocess.run(command, cwd=ROOT, check=True)
    report = json.loads((folder / "lines.json").read_text())
    totals = report["totals"]
    print(f"{totals['num_statements']} lines, of which {totals['missing_lines']} were not executed")
    prefix = len("tritonddp/")
    return {path[prefix:]: each["missing_lines"] for path, each in report["files"].items()}


def compare(missing: dict[str, list[int]]) -> int:
    """Print what is missing and not named, and what is named and not missing; how much that is."""
    differences = 0
    spans = named()
    for name, numbers in missing.items():
        said = {number for each in spans.get(name, {}).values() for at in each for number in at}
        if rest := sorted(set(numbers) - said):
            differences += len(rest)
            lines = (PACKAGE / name).read_text().splitlines()
            print(f"\n{name}: not executed, and not named")
            print("\n".join(f"{number:5} {lines[number - 1]}" for number in rest))
    for name, reasons in spans.items():
        for text, found in reasons.items():
            if not any(set(at) & set(missing.get(name, [])) for at in found):
                differences += 1
                print(f"\n{name}: named, and executed: {text}")
    return differences


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(1 if compare(measure(Path(folder), sys.argv[1:])) else 0)


if __name__ == "__main__":
    main()
