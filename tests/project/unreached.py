"""Lines of the package that no test on a machine without a GPU executes, and why.

    python tests/project/unreached.py [arguments of pytest]     or: make coverage

runs the tests under coverage.py, in all processes that they start, and prints which lines none of
them has executed and :data:`UNREACHED` does not name, and which of its entries tests do reach. It
takes half an hour. ``test_unreached.py`` looks in each run whether what is named is there.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tritonddp"

# Reasons that several lines have.
GPU = "a CUDA device; tests/gpu"
GPUS = "several CUDA devices"
COMPILED = (
    "code of compiled kernels, not of interpreted ones; tests/aot compiles it, tests/gpu runs it"
)
ENGINE = (
    "runs in threads of torch's distributed engine, which coverage.py sees from Python 3.12 on; "
    "tests/reducer/test_distributed_autograd.py"
)
GUARD = "a guard: no way is known to get there"
NOTHING = "a part of a buffer, or of a message, that holds nothing at all"
DISAGREE = "ranks that disagree just there; tests/differential and tests/faults do not hit it"

# By file: the first line of a statement, which is meant with all that is in it (of an ``if``,
# without its ``else``), behind "function: " where others begin so too; and the reason.
UNREACHED: dict[str, dict[str, str]] = {
    "_device.py": {"each.event.synchronize()": GPU},
    "_torch.py": {
        "will_engine_execute: raise": "what else torch may raise; it goes on",
        "def gradients_in_context(context: int) -> dict[Tensor, Tensor]:": ENGINE,
        "def put_into_context(context: int, param: Tensor, gradient: Tensor) -> None:": ENGINE,
        "def _put() -> Any:": ENGINE,
        "raise NotImplementedError": "the one class that inherits it overrides it",
    },
    "buckets/bucket.py": {
        "pack: raise": "what else torch raises in a kernel, as for want of memory: it goes on",
        "if grad.shape != param.shape or grad.dtype != param.dtype:": (
            "torch checks the same before, when a gradient is accumulated or assigned"
        ),
    },
    "buckets/parameters.py": {
        "verify: raise RuntimeError(": "verify_same, before it, raises where hashes have differed",
    },
    "buckets/residuals.py": {
        "add_to: if quantization is None or quantization.residuals is None:": (
            "a parameter of a loaded state is quantised no more: its dtype is another one now"
        ),
    },
    "buckets/view_bucket.py": {
        "in_buffer: if self.flat is None:": "a lazy bucket, when buckets are renewed",
    },
    "comm/all_reduce.py": {
        "exchange_rows: except RuntimeError as error:": "a connection that breaks among these rows",
    },
    "comm/grad_bucket.py": {"if bucket.flat is None:": "the hook of a lazy bucket: " + GUARD},
    "comm/quantized.py": {
        "launch: except RuntimeError as error:": "NCCL that refuses at once; gloo is in a thread",
    },
    "comm/run.py": {
        "launch_nan: if bucket.index in self.skipped:": (
            "a skipped bucket that a broken backward had yet to pass"
        ),
    },
    "compat/stock_ddp.py": {
        "return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)": GPUS,
        "return gather(outputs, output_device, dim=self.dim)": GPUS,
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
    "coordination/processes.py": {"_scope: except OSError:": "a system without /proc, as macOS is"},
    "ddp.py": {"if self.device_ids:": GPU},
    "diagnostics/trace.py": {"if len(devices) > 1:": GPUS},
    "features/auto_compression/planner.py": {
        "if backward is None:": "buckets change before any rank has timed a backward",
        "on_compute_end: if self._running is None:": "the end of a backward that is not timed",
    },
    "features/auto_compression/probe.py": {
        "if kind is Kind.ALL_TO_ALL:": GPU,
        "return lambda: _wait([all_gather_single(whole, other[:part], self._group)])": GPU,
        "settle(device)": GPU + "; or torch with several threads, and tests have one",
        "_clock: return time.perf_counter()": GPU + "; or several threads",
        'return float("inf")': GPU,
    },
    "features/join.py": {
        "if len({said[number] & _OVER_PRESENT for number in present}) > 1:": DISAGREE,
    },
    "integrations/fabric.py": {
        "class TritonDDPStrategy(_Base):": "needs lightning; make test-clients",
    },
    "kernels/flatten.py": {"widen: return x.to(tl.float32).to(TO)": COMPILED},
    "kernels/quantized/blocks.py": {
        "return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)": COMPILED,
        "return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)": COMPILED,
    },
    "kernels/quantized/quantize.py": {
        "if prepared is None:": NOTHING,
        "if programs == 0:": NOTHING,
    },
    "kernels/quantized/reduce_parts.py": {"if programs == 0:": NOTHING},
    "reducer/capture.py": {
        "if manager.planner is not None:": (
            'compression="auto" on a GPU; the recorded device would time its kernels for minutes'
        ),
    },
    "reducer/in_context.py": {
        "def __init__(": ENGINE,
        "def read(self, numbers: range) -> None:": ENGINE,
        "def write(self) -> None:": ENGINE,
        "def backward(gradient: Tensor) -> None:": ENGINE,
        "def _begin(reducer: Reducer, context: int, forward: Forward) -> None:": ENGINE,
        "def _arrived(": ENGINE,
        "_send: run = backward.run": ENGINE,
        "_send: for bucket in run.buckets[len(run.works) :]:": ENGINE,
        "def _end(reducer: Reducer, backward: ContextReduction) -> None:": ENGINE,
        "def _take_up_added(": ENGINE,
        "def recover(reducer: Reducer) -> None:": ENGINE,
        "def _telling_at_end() -> Iterator[None]:": ENGINE,
        "def _raise(error: Exception) -> None:": ENGINE,
    },
    "reducer/on_demand.py": {
        "_reduce_now: for call in reducer.events.on_abort:": "check_finite, of a refused request",
        "finalize_backward: except Mismatch as error:": DISAGREE,
    },
    "reducer/participation.py": {
        'if getattr(node, "variable", None) is None:': GUARD,
    },
    "reducer/readiness.py": {
        "gradient_is_final: if told is None:": "the wrapper is dropped in the midst of a backward",
    },
    "reducer/recovery.py": {
        "if run.is_captured:  # a capture executes no collective": "its events: check_finite",
        "_make_up: except Mismatch as error:": DISAGREE,
        "_still_runs: tries -= 1": GPU,
        "_still_runs: time.sleep(_PAUSE)": GPU,
    },
    "reducer/reducer.py": {
        "_opening: return True": "nobody asks while a run is being opened",
        "check_pending: recovery.raise_mismatch(self, error, None)": GPU,
        "on_backward: on_demand.check_finalized(self)": "a backward while one waits for its end",
        "on_segment_ready: if run is None or run.is_local or run.filled[number]:": GUARD,
        "on_unusual_order: if run is None or run.is_local:": GUARD,
    },
}


def statements(name: str) -> Iterator[tuple[str, str, range]]:
    """Function, first line and numbers of the lines of each statement of a file."""
    source = (PACKAGE / name).read_text()
    lines = source.splitlines()

    def walk(node: ast.AST, function: str) -> Iterator[tuple[str, str, range]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt | ast.excepthandler):
                last = child.body[-1].end_lineno if isinstance(child, ast.If) else child.end_lineno
                numbers = range(child.lineno, (last or child.lineno) + 1)
                yield function, lines[child.lineno - 1].strip(), numbers
            is_function = isinstance(child, ast.FunctionDef)
            yield from walk(child, child.name if is_function else function)  # type: ignore[attr-defined]

    yield from walk(ast.parse(source), "")


@cache
def named() -> dict[str, dict[str, list[range]]]:
    """By file and text of :data:`UNREACHED`: the lines of each statement that begins so."""
    return {
        name: {
            text: [
                at for place, first, at in statements(name) if text in (first, f"{place}: {first}")
            ]
            for text in reasons
        }
        for name, reasons in UNREACHED.items()
    }


def measure(folder: Path, arguments: list[str]) -> dict[str, list[int]]:
    """Run the tests; returns the lines that none has executed, by file, and prints how many."""
    settings = folder / "coveragerc"
    settings.write_text(
        f"[run]\ndata_file = {folder}/data\nparallel = true\nsource_pkgs = tritonddp\n"
        "core = ctrace\npatch = _exit, fork\n"
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
