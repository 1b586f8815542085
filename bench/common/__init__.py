"""What the benchmarks of kernels and of decoding share: clock, machine, records, comparison."""
