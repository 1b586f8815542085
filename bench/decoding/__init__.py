"""Decoding methods measured side by side: a group of them shares texts, cache and machine."""
