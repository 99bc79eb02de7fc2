"""The last good checkpoint: what is written of a run, and how a run goes on from it."""
