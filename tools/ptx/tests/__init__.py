"""The emulator's own tests, and our kernels executed in it."""
