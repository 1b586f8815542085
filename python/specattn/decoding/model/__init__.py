"""A checkpoint: loading, families, weights by role."""
