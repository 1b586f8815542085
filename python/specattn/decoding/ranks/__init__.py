"""Several ranks that decode one text: lockstep, a KV cache dealt out over them."""
