"""evenload: evens the load of LLM training inside Megatron-Core and DeepSpeed."""

__version__ = "0.1.0"
