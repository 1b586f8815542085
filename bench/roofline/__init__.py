"""What `run_kernels.py` is made of: ceilings, cost formulas, cases, peers, clock, report."""
