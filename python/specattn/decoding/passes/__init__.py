"""Passes of a model over a KV cache, and the ways to run one."""
