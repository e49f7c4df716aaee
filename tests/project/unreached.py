"""Lines of the package that no test on a machine without a GPU executes, and why.

    python tests/project/unreached.py [arguments of pytest]     or: make coverage

runs the tests under coverage.py, in all processes that they start (half an hour). It prints the
lines that no test executed and that are not in :data:`UNREACHED`, and the entries that tests
execute.
"""

import json
import sys
from math import inf

from measured import FOLDER, PACKAGE, measure, run_coverage

# Reasons of several entries.
REASONS = {
    "compiled": "code of compiled kernels; tests/aot compiles it, tests/gpu runs it",
    "disagree": "ranks that disagree exactly there; no random program and no fault does",
    "engine": "runs in threads of torch's distributed engine, which coverage.py sees from Python "
    "3.12 on; tests/reducer/test_distributed_autograd.py",
    "gpu": "a CUDA device; tests/gpu",
    "gpus": "several CUDA devices",
    "guard": "a guard: no way is known to get there",
    "lightning": "needs lightning; make test-clients",
    "nothing": "an empty part of a buffer or of a message",
}

# File, functions, the largest number of statements of each that no test executes, and the reason.
_TABLE = """
_torch.py put_into_context,_put all engine
buckets/bucket.py Bucket.check_kind 1 torch checks the same when a gradient is accumulated or set
buckets/bucket.py Bucket.in_buffer 1 a lazy bucket, when buckets are renewed
buckets/parameters.py ModuleParameters.verify 1 verify_same raises before it where hashes differ
buckets/residuals.py add_to 1 the dtype of a parameter of a loaded state has changed
buckets/grad_storage/grad_storage.py GradStorage.pack 1 torch raises, for example out of memory
comm/grad_bucket.py buffer_of 1 the hook of a lazy bucket: a guard: no way is known to get there
comm/reduction.py Reduction._launch_nan 4 a failed backward skips a bucket, or a rank ends
comm/reduction.py Reduction._exchange_rows 7 a connection that breaks among these rows
compat/stock_ddp.py StockDDPNames.scatter,StockDDPNames.gather all gpus
config.py sendable 5 gpu
config.py process_group_of 1 a build of torch without torch.distributed
config.py device_ids_of 2 gpu
config.py _device_index all gpu
coordination/processes.py _scope 2 a system without /proc, as macOS is
diagnostics/hang.py watch 3 no further thread can be started
wrapper.py DistributedDataParallel._pre_forward 3 gpu
features/join.py JoinProtocol._agree 1 disagree
features/rpc_contexts.py watch.hook,_begin,_arrives,_broke_off,ContextBackward.__init__ all engine
features/rpc_contexts.py ContextBackward.begin,ContextBackward.end,ContextBackward.drain all engine
features/rpc_contexts.py ContextBackward._read,ContextBackward._write all engine
features/rpc_contexts.py ContextBackward._leave,ContextBackward._refuse_unused all engine
integrations/fabric.py <module>,TritonDDPStrategy.setup_module all lightning
kernels/flatten.py widen 1 compiled
kernels/quantized/quantize.py quantize,_prepare 1 nothing
kernels/quantized/reduce_parts.py _prepare 1 nothing
reducer/graph/participation.py accumulating_nodes 1 guard
reducer/graph/participation.py will_engine_execute 1 any other error of torch, which is raised again
reducer/graph/readiness.py ReadyTracker._hook_end.gradient_is_final 1 the wrapper is deleted
reducer/graph/backward.py Backward.has_failed 2 gpu
reducer/reducer.py Reducer.drain 2 disagree
reducer/reducer.py Reducer.check_pending 1 gpu
reducer/reducer.py Reducer._reduce_now 1 on_abort, which check_finite has, of a refused request
reducer/autograd_driver.py AutogradDriver.drain 1 on_abort of a capture, which check_finite has
reducer/autograd_driver.py AutogradDriver.on_segment_ready,AutogradDriver.on_unusual_order 1 guard
"""
# By file and function (``""`` is the module): the number of statements, and the reason.
UNREACHED: dict[tuple[str, str], tuple[float, str]] = {}
for _line in filter(None, _TABLE.splitlines()):
    _file, _functions, _number, _reason = _line.split(maxsplit=3)
    for _function in _functions.replace("<module>", "").split(","):
        _most = inf if _number == "all" else int(_number)
        UNREACHED[_file, _function] = _most, REASONS.get(_reason, _reason)


def missing_lines() -> dict[tuple[str, str], list[int]]:
    """The first line of each statement that no test executed, by file and function."""
    run_coverage("json", "-o", f"{FOLDER}/lines.json")
    report = json.loads((FOLDER / "lines.json").read_text())
    totals = report["totals"]
    print(f"{totals['num_statements']} lines, of which {totals['missing_lines']} were not executed")
    return {
        (path.removeprefix("tritonddp/"), function): each["missing_lines"]
        for path, file in report["files"].items()
        for function, each in file["functions"].items()
        if each["missing_lines"]
    }


def main() -> int:
    measure(sys.argv[1:])
    found, differ = missing_lines(), False
    for file, function in sorted(found.keys() | UNREACHED.keys()):
        numbers = found.get((file, function), [])
        most, _ = UNREACHED.get((file, function), (0, ""))
        differ |= len(numbers) > most or not numbers
        if not numbers:
            print(f"\n{file}: named, and executed: {function}")
        elif len(numbers) > most:
            print(f"\n{file}, {function}: {len(numbers)} not executed, {most} are named")
            lines = (PACKAGE / file).read_text().splitlines()
            print("\n".join(f"{number:5} {lines[number - 1]}" for number in numbers))
    return differ


if __name__ == "__main__":
    sys.exit(main())
