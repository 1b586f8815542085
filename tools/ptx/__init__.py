"""A PTX emulator: runs what Triton, Gluon and NVRTC compile, and finds what they do wrong.

GPU kernels are executed instruction by instruction in numpy, where there is no GPU. A `Fault` names
the instruction, its source line and the threads: races in shared memory, undefined values, accesses
out of bounds, barriers that not all reach. Counts (bytes, sectors, bank conflicts, instructions)
come with each launch.

Parts, each importing only those before it::

    parser, memory, registers, order, counts    text, values and their defined bits, races
    machine and the instructions' modules       waves of blocks; divergence
    offline                                     Triton kernels compiled for GPUs that are not here
    launch, cuda_launch                         calls of our primitives, served by the emulator
    cuda_build                                  what ptxas says of the CUDA C++ kernels
    stub_driver, cuda_stub                      GPUs that are not there, for the host's side alone
    prediction                                  what kernels would move and take (bench --emulate)

Nothing in `specattn` imports it. README.md says how to use it, what it checks and what was run.
"""
