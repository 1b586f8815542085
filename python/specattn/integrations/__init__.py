"""specattn inside other engines: one package each, imported by nobody but its engine."""
