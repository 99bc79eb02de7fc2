"""DeepSpeed scripts that nobody edits: their loader planned, by the ``evenload`` section of their ds_config."""
