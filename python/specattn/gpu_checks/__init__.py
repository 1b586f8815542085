"""Checks of every kernel on a GPU, and times of attention there: what `specattn gpu-check` runs.

`cases` are the calls and what is right, `workers` the processes that make them, `times` attention
beside other libraries. What passed is kept by `specattn.gpu_record`.
"""
