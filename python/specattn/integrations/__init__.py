"""specattn under other engines; each module is imported on its own, for it needs its engine."""
