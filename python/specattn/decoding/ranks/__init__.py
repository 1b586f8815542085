"""Several ranks that decode one text: lockstep, a KV cache sharded over them."""
