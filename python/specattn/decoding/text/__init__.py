"""Texts of a run: prompts, sequences, processors, sampling, statistics. Knows no model."""
