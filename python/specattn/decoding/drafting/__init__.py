"""What methods share: chains, trees, lookup tables, and how much to draft."""
