"""What is expected of each of torch's tests of DistributedDataParallel (torch 2.13).

A test has its place in one of four tables. One that is not expected to pass stands under its
reason; once it passes, ``test_conformance.py`` fails until it has been moved to ``_PASSES``.
"""

PASSES = "passes"

_PASSES = """
    test_DistributedDataParallel
    test_DistributedDataParallelCPU
    test_DistributedDataParallelCPU_grad_is_view
    test_DistributedDataParallel_non_default_stream
    test_DistributedDataParallel_requires_grad
    test_DistributedDataParallel_with_amp_and_grad_is_view
    test_accumulate_gradients_no_sync
    test_accumulate_gradients_no_sync_allreduce_hook
    test_accumulate_gradients_no_sync_allreduce_with_then_hook
    test_accumulate_gradients_no_sync_grad_is_view
    test_compute_bucket_assignment_by_size_sparse_error_without_logger
    test_ddp_apply_optim_in_backward
    test_ddp_apply_optim_in_backward_grad_as_bucket_view_false
    test_ddp_apply_optim_in_backward_ignored_params
    test_ddp_broadcast_buffer
    test_ddp_broadcast_buffer_via_hook
    test_ddp_broadcast_buffers_deprecation_warning
    test_ddp_bucket_cap_mb_list
    test_ddp_buffer_hook_allreduce
    test_ddp_buffer_hook_allreduce_return_future
    test_ddp_build_debug_param_to_name_mapping
    test_ddp_build_debug_param_to_name_mapping_requires_grad
    test_ddp_comm_hook_logging
    test_ddp_compile_static_graph
    test_ddp_control_flow_different_across_ranks
    test_ddp_control_flow_same_across_ranks
    test_ddp_create_graph
    test_ddp_device_mesh_initialization
    test_ddp_forward_backward_hook
    test_ddp_grad_div_uneven_inputs
    test_ddp_hook_parity_allreduce
    test_ddp_hook_parity_allreduce_process_group
    test_ddp_hook_parity_post_localSGD
    test_ddp_hook_parity_powerSGD
    test_ddp_ignore_params_arg
    test_ddp_init_sync_buffers_with_forward_sync_buffers_false
    test_ddp_join_model_equivalence
    test_ddp_join_respects_forward_sync_buffers_false
    test_ddp_logging_data_cpu
    test_ddp_model_diff_num_params_across_ranks
    test_ddp_model_diff_shape_across_ranks
    test_ddp_namedtuple
    test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none
    test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none
    test_ddp_native_mixed_precision_ignored_params
    test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none
    test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none
    test_ddp_new_tensor_in_fwd
    test_ddp_new_tensor_in_fwd_static_graph
    test_ddp_python_error_logged
    test_ddp_remove_autograd_hooks
    test_ddp_returns_tensor_with_no_grad
    test_ddp_shared_grad_acc_unused_params
    test_ddp_sink_noclone
    test_ddp_static_graph_nested_types
    test_ddp_sync_module_states
    test_ddp_uneven_input_exception
    test_ddp_uneven_input_join_disable
    test_ddp_uneven_inputs
    test_ddp_zero_output_features
    test_detect_ddp_is_actually_static
    test_different_graph_across_ranks
    test_get_data_parallel_params
    test_grads_same_across_ranks_with_no_sync
    test_output_unused_in_loss_dict_module
    test_output_unused_in_loss_tuple_module
    test_post_localSGD_optimizer_parity
    test_post_localSGD_optimizer_parity_grad_is_view
    test_post_localSGD_optimizer_parity_with_hierarchical_sgd
    test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view
    test_post_localSGD_optimizer_step_reload
    test_skip_all_reduce_unused_parameters
    test_stateless_api_with_ddp
    test_static_graph_api_cpu
    test_static_graph_multi_forward
    test_undefined_grad_parity_unused_parameters
    test_verify_model_across_rank_with_logger
    test_verify_model_across_rank_without_logger
"""

# What tritonddp lacks.
_NOT_YET: dict[str, str] = {}

# Where tritonddp differs from stock deliberately: see tests/differential/named/README.md.
_ON_PURPOSE = {
    "an unused parameter is no error unless find_unused_parameters=False says so": """
        test_ddp_multiple_nested_unused_params_err_ignore_params
        test_ddp_multiple_nested_unused_params_error
        test_ddp_unused_params_rebuild_buckets_exception
    """,
    "a graph that changes is right, also with static_graph=True": """
        test_invalid_static_graph
    """,
    "it looks for the profiler's event of a graph walk, and there is none": """
        test_ddp_profiling_autograd_profiler
        test_ddp_profiling_torch_profiler
    """,
    "it hands the logger to a function of torch that takes only torch's C++ object": """
        test_compute_bucket_assignment_by_size_sparse_error_with_logger
    """,
}

# What fails with stock as well, on CPUs over gloo.
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
    "it looks at the index of the GPU that inputs are moved to": """
        test_ddp_device
    """,
    "it looks for the number of the GPU in the logging data": """
        test_ddp_logging_data_gpu
    """,
    "it reads what NCCL notes in traces": """
        test_ddp_profiling_execution_trace
    """,
    "torch skips it: ranks reduce different parameters, and gloo times out": """
        test_ddp_has_finalized
    """,
    "torch 2.13 skips it: it loads a hook with weights_only=True": """
        test_ddp_hook_pickling_powerSGD
    """,
}

# What fails with the torch of these tables and passes with another one.
PASSES_ELSEWHERE = {
    "test_ddp_hook_pickling_powerSGD"  # 2.15
}

# Torch's tests say how many GPUs they need at least; two are enough for all others.
WORLD_SIZES = {
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd": 4,
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view": 4,
}


def _reasons(*tables: dict[str, str]) -> dict[str, str]:
    return {name: why for table in tables for why, names in table.items() for name in names.split()}


_PASSING = dict.fromkeys(_PASSES.split(), PASSES)

# ``PASSES``, or the reason why not, by the name of the test.
EXPECTED = {
    "ours": _PASSING | _reasons(_NOT_YET, _ON_PURPOSE, _NEITHER),
    "stock": _PASSING | dict.fromkeys(_reasons(_NOT_YET, _ON_PURPOSE), PASSES) | _reasons(_NEITHER),
}
