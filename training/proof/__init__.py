"""The parts of `evenload verify`: a planned run beside plain training, step by step."""
