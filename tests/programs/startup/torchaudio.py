"""Stands for torchaudio, which LLaMA-Factory imports and reads sound with: it has no build for this torch on CPUs."""
