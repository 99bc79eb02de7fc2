"""Steps planned and simulated from lengths alone, for one setting or for every combination of several."""
