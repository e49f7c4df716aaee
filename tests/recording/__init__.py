"""The CUDA path without a GPU: tensors on the CPU that pass for a GPU's, and a record of its work.

:func:`~recording.device.recording` makes tensors on the CPU say that they are on ``cuda:0``, and
``torch.cuda``'s streams and events, NCCL's collectives and the package's kernels note what they
read and write, and in which order. All work is done at once, so numbers are right even where the
order is wrong: :class:`~recording.recorder.Recorder` compares the order that streams and events
promise, and reports what a GPU might do otherwise.
"""
