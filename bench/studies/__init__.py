"""What is asked of the benchmarks: the tables of papers, and questions of our own."""
