"""From sequences placed on ranks to micro-batches and plans."""
