"""The CUDA path without a GPU: tensors on the CPU that report a GPU, and a record of its work.

In :func:`~recording.device.recording`, tensors on the CPU report that they are on ``cuda:0``.
Streams and events of ``torch.cuda``, collectives of NCCL and the kernels of the package record the
memory that they read and write, and their order. All work is done immediately, so numbers are right
even if the order is wrong. :class:`~recording.recorder.Recorder` compares the accesses with the
order that streams and events guarantee, and reports what a GPU might do differently.
"""
