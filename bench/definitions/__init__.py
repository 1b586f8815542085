"""Definitions for flashinfer-bench, with workloads that real decoding made."""
