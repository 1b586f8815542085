"""Tools of this repository's own; none is installed."""
