"""What several verbs share: the job of a rank, the launcher, drawing of batches, metrics, tables."""
