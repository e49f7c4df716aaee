"""Attributes of stock DDP, for code that reads and calls them.

All public names are here. Private names are here only for the code that uses them: dynamo
(``_get_active_ddp_module``), torch's ``Join`` and its hooks of ZeRO and of optimizers
(``_has_rebuilt_buckets``, ``_get_data_parallel_params``, ``_run_allreduce_hook``), Accelerate and
Lightning (``prepare_for_backward``, ``_rebuild_buckets``, ``_delay_all_reduce``), forwards that
were copied from stock DDP, such as OpenMMLab's ``train_step`` (``_lazy_init``, ``_sync_buffers``,
``_check_sync_bufs_pre_fwd``, ``_check_global_requires_backward_grad_sync`` and the like), trainers
whose ranks join and leave (``_update_process_group``), model code
(``_set_params_and_buffers_to_ignore_for_model``), and torch's own tests.
"""
