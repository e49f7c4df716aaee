"""Stock's attributes, for code that reads and calls them.

All public ones are here. A private one is kept if one of these uses it:

===================================== ===========================================================
name                                  who uses it
===================================== ===========================================================
of the wrapper
``_has_rebuilt_buckets``              torch's hooks of ZeRO
``_get_active_ddp_module``,           dynamo
``bucket_bytes_cap``, ``compile``
``_get_data_parallel_params``         torch's hooks that step optimizers
``_join_config``, ``join_hook``,      torch's Join
``join_device``,
``join_process_group``
``require_backward_grad_sync``        Accelerate, Lightning, torch's ``replicate``
``require_forward_param_sync``,       Accelerate, Lightning
``parameters_to_ignore``
``_get_ddp_logging_data``,            Lightning, torch's tests
``_set_static_graph``
``_set_params_and_buffers_to_ignore   model code, torch's tests
_for_model``, ``broadcast_buffers``
``_update_process_group``             trainers whose ranks come and go, torch's tests
``will_sync_module_buffers``          wrappers that go on from stock's
``_use_python_reducer``,              forwards copied from stock's, as OpenMMLab's ``train_step``
``_lazy_init``, ``_lazy_init_ran``,
``_delay_all_reduce_all_params``,
``_check_sync_bufs_pre_fwd``,
``_check_sync_bufs_post_fwd``,
``_sync_buffers``,
``_check_global_requires_backward
_grad_sync``,
``_inside_ddp_forward``,
``_clear_grad_buffer``,
``_static_graph_delay_allreduce
_enqueued``
``_build_params_for_reducer``,        torch's tests
``_build_debug_param_to_name
_mapping``,
``_check_reducer_finalized``,
``_default_broadcast_coalesced``,
``_register_buffer_comm_hook``,
``_register_builtin_comm_hook``,
``_register_fused_optim``,
``_remove_autograd_hooks``,
``_set_ddp_runtime_logging_sample
_rate``, ``_set_ddp_sink_clone``,
``broadcast_bucket_size``,
``bucket_bytes_cap_list``
of its reducer
``prepare_for_backward``              Accelerate, Lightning, torch's pipelining
``_rebuild_buckets``,                 Lightning
``_delay_all_reduce``
``_run_allreduce_hook``               torch's hooks that step optimizers
``prepare_for_forward``,              forwards copied from stock's
``_set_forward_pass_work_handle``
``_check_reducer_finalized``,         torch's tests
``_ddp_graph_static``,
``_get_local_used_map``,
``_remove_autograd_hooks``,
``_set_static_graph``
===================================== ===========================================================
"""
