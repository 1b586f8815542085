"""A PTX emulator: runs what Triton, Gluon and NVRTC compile, and finds what they do wrong.

See README.md in this folder.
"""
