"""Torch's tests of DistributedDataParallel, and why some are not expected to pass (torch 2.13).

Once such a test passes, ``test_conformance.py`` fails until its name is removed here.
"""

import ast
import functools
from pathlib import Path

import torch

SOURCE = Path(torch.__file__).parent / "testing/_internal/distributed/distributed_test.py"

# tritonddp differs from stock DDP deliberately: see tests/differential/named/README.md.
_ON_PURPOSE = {
    "an unused parameter is no error unless find_unused_parameters=False says so": """
        test_ddp_multiple_nested_unused_params_err_ignore_params
        test_ddp_multiple_nested_unused_params_error
        test_ddp_unused_params_rebuild_buckets_exception
    """,
    "a graph that changes is right, also with static_graph=True": """
        test_invalid_static_graph
    """,
    "it looks for a profiler event of the graph traversal, which tritonddp does not need": """
        test_ddp_profiling_autograd_profiler
        test_ddp_profiling_torch_profiler
    """,
    "it passes the logger to a function of torch that accepts only torch's C++ object": """
        test_compute_bucket_assignment_by_size_sparse_error_with_logger
    """,
}

# Tests that fail with stock DDP, too, on CPUs over gloo.
_NEITHER = {
    "SyncBatchNorm needs a GPU": """
        test_DistributedDataParallel_SyncBatchNorm
        test_DistributedDataParallel_SyncBatchNorm_2D_Input
        test_DistributedDataParallel_SyncBatchNorm_Channels_Last
        test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value
        test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient
        test_DistributedDataParallel_SyncBatchNorm_No_Affine
        test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process
        test_DistributedDataParallel_SyncBatchNorm_half
        test_ddp_inference
        test_ddp_sync_bn_training_vs_eval
        test_ddp_uneven_inputs_stop_iteration_sync_bn
        test_sync_bn_logged
    """,
    "it checks the index of the GPU that inputs are moved to": """
        test_ddp_device
    """,
    "it checks the number of the GPU in the logging data": """
        test_ddp_logging_data_gpu
    """,
    "it reads the records of NCCL in traces": """
        test_ddp_profiling_execution_trace
    """,
    "torch skips it: ranks reduce different parameters, and gloo times out": """
        test_ddp_has_finalized
    """,
    "torch 2.13 skips it: it loads a hook with weights_only=True": """
        test_ddp_hook_pickling_powerSGD
    """,
}

# These fail with torch 2.13 and pass with another version.
PASSES_ELSEWHERE = {
    "test_ddp_hook_pickling_powerSGD"  # 2.15
}

# Number of ranks, if it is not two.
WORLD_SIZES = {
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd": 4,
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view": 4,
}


def reason(name: str) -> str | None:
    """Why this test is expected to fail, if it is."""
    reasons = _ON_PURPOSE | _NEITHER
    return next((why for why, names in reasons.items() if name in names.split()), None)


@functools.cache
def ddp_tests() -> list[str]:
    """Names of the tests that use ``DistributedDataParallel``, or a method that uses it."""
    outer = _class_in(ast.parse(SOURCE.read_text()), "DistributedTest")
    methods = _class_in(outer, "_DistTestBase").body
    used = {each.name: _names_in(each) for each in methods if isinstance(each, ast.FunctionDef)}
    reaching = {"DistributedDataParallel"}
    while more := {n for n, names in used.items() if n not in reaching and names & reaching}:
        reaching |= more
    return sorted(name for name in reaching if name.startswith("test_"))


def _class_in(place: ast.Module | ast.ClassDef, name: str) -> ast.ClassDef:
    return next(each for each in place.body if isinstance(each, ast.ClassDef) and each.name == name)


def _names_in(method: ast.FunctionDef) -> set[str]:
    nodes = [node for statement in method.body for node in ast.walk(statement)]
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {node.attr for node in nodes if isinstance(node, ast.Attribute)}
