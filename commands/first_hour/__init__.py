"""``evenload doctor --gpu``: what a machine's first hour with evenload finds, in minutes, as one page to send back."""
