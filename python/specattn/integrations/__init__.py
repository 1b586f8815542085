"""specattn inside other engines: one package each, imported only by or for its engine."""
