"""GPU kernels in Triton, one file per primitive.

The function of the file's name takes the arguments of that torch operator and writes into the
outputs, which come last. Arguments are taken as they are: `specattn.ops` checks shapes, dtypes and
devices, packs tree masks and allocates.

`rotate_heads`, `rms_norm`, `children`, `draw` and `move_path` are no primitives: inner functions of
a decoder layer, of drafts and of a round, which trust what they are given.

On Hopper `_hopper.py` serves some calls (`attention_plans.fastest`), in Gluon, which the
interpreter does not run: executed in the PTX emulator (sm_90), and on an H100.

The others are tested in Triton's interpreter, executed in a PTX emulator (sm_80 and sm_90) and
compiled for four architectures; the primitives but `linear_few_rows` ran on an H100.
"""
