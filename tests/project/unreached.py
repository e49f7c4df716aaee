"""Lines of the package that no test on a machine without a GPU executes, and why.

    python tests/project/unreached.py [arguments of pytest]     or: make coverage

runs the tests under coverage.py, in all processes that they start (half an hour). It prints the
lines that no test executed and that are not in :data:`UNREACHED`, and the entries that tests
execute. An entry names a function; ``test_unreached.py`` checks the names.
"""

import sys
from collections.abc import Iterable
from math import inf

from measured import PACKAGE, functions, measure, missing_lines

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
LIGHTNING = "needs lightning; make test-clients"
GUARD = "a guard: no way is known to get there"
NOTHING = "an empty part of a buffer or of a message"
ALL = inf  # statements of a function
DISAGREE = "ranks that disagree exactly there; tests/differential and tests/faults do not"

# By file and function: the largest number of its statements that no test executes, and the reason.
UNREACHED: dict[str, dict[str, tuple[float, str]]] = {
    "_torch.py": {
        "put_into_context": (ALL, ENGINE),
        "_put": (ALL, ENGINE),
    },
    "buckets/bucket.py": {
        "Bucket.check_kind": (1, "torch checks the same when a gradient is accumulated or set"),
        "Bucket.in_buffer": (1, "a lazy bucket, when buckets are renewed"),
    },
    "buckets/parameters.py": {
        "ModuleParameters.verify": (1, "verify_same, before it, raises where hashes have differed")
    },
    "buckets/residuals.py": {
        "add_to": (
            1,
            "a parameter of a loaded state is not quantized any more: its dtype has changed",
        )
    },
    "buckets/grad_storage/grad_storage.py": {
        "GradStorage.pack": (1, "an error of torch that is raised again, such as out of memory"),
    },
    "comm/grad_bucket.py": {"buffer_of": (1, "the hook of a lazy bucket: " + GUARD)},
    "comm/reduction.py": {
        "Reduction._launch_nan": (
            4,
            "a skipped bucket that a failed backward did not reach; a rank that ends there",
        ),
        "Reduction._exchange_rows": (7, "a connection that breaks among these rows"),
    },
    "compat/stock_ddp.py": {
        "StockDDPNames.scatter": (ALL, GPUS),
        "StockDDPNames.gather": (ALL, GPUS),
    },
    "config.py": {
        "sendable": (5, GPU),
        "process_group_of": (1, "a build of torch without torch.distributed"),
        "device_ids_of": (2, GPU),
        "_device_index": (ALL, GPU),
    },
    "coordination/processes.py": {"_scope": (2, "a system without /proc, as macOS is")},
    "diagnostics/hang.py": {"watch": (3, "no further thread can be started")},
    "wrapper.py": {"DistributedDataParallel._pre_forward": (3, GPU)},
    "features/join.py": {"JoinProtocol._agree": (1, DISAGREE)},
    "features/rpc_contexts.py": dict.fromkeys(
        (
            *("watch.hook", "_begin", "_arrives", "_broke_off"),
            *(f"ContextBackward.{name}" for name in ("__init__", "begin", "end", "drain")),
            *(
                f"ContextBackward.{name}"
                for name in ("_read", "_write", "_leave", "_refuse_unused")
            ),
        ),
        (ALL, ENGINE),
    ),
    "integrations/fabric.py": {
        "": (1, LIGHTNING),
        "TritonDDPStrategy": (ALL, LIGHTNING),
        "TritonDDPStrategy.setup_module": (ALL, LIGHTNING),
    },
    "kernels/flatten.py": {"widen": (1, COMPILED)},
    "kernels/quantized/quantize.py": {"quantize": (1, NOTHING), "_prepare": (1, NOTHING)},
    "kernels/quantized/reduce_parts.py": {"_prepare": (1, NOTHING)},
    "reducer/graph/participation.py": {
        "accumulating_nodes": (1, GUARD),
        "will_engine_execute": (1, "any other error of torch, which is raised again"),
    },
    "reducer/graph/readiness.py": {
        "ReadyTracker._hook_end.gradient_is_final": (
            1,
            "the wrapper is deleted during a backward",
        )
    },
    "reducer/graph/backward.py": {"Backward.has_failed": (2, GPU)},
    "reducer/reducer.py": {
        "Reducer.drain": (2, DISAGREE),
        "Reducer.check_pending": (1, GPU),
        "Reducer._reduce_now": (1, "on_abort, which check_finite has, of a refused request"),
    },
    "reducer/autograd_driver.py": {
        "AutogradDriver.drain": (1, "on_abort of a capture, which check_finite has"),
        "AutogradDriver.on_segment_ready": (1, GUARD),
        "AutogradDriver.on_unusual_order": (1, GUARD),
    },
}


def missing_of(name: str, numbers: Iterable[int]) -> dict[str, list[int]]:
    """The first line of each statement with one of these lines, by function."""
    wanted = set(numbers)
    return {
        function: lines
        for function, statements in functions(name).items()
        if (lines := [each.start for each in statements if wanted & set(each)])
    }


def compare(missing: dict[str, list[int]]) -> int:
    """Print unlisted missing lines and listed functions without any; return their number."""
    differences = 0
    for name in sorted({*missing, *UNREACHED}):
        lines = (PACKAGE / name).read_text().splitlines()
        found, reasons = missing_of(name, missing.get(name, [])), UNREACHED.get(name, {})
        for function, numbers in found.items():
            most, _ = reasons.get(function, (0, ""))
            if len(numbers) > most:
                differences += len(numbers)
                print(f"\n{name}, {function}: {len(numbers)} not executed, {most} are named")
                print("\n".join(f"{number:5} {lines[number - 1]}" for number in numbers))
        for function in reasons.keys() - found.keys():
            differences += 1
            print(f"\n{name}: named, and executed: {function}")
    return differences


def main() -> None:
    measure(sys.argv[1:])
    sys.exit(1 if compare(missing_lines()) else 0)


if __name__ == "__main__":
    main()
