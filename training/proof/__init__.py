"""The parts of `evenload verify`: a planned run against plain training, step by step."""
