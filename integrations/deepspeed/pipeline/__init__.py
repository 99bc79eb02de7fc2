"""Plans on DeepSpeed's pipelines: stages of a Hugging Face model, instructions for its `PipelineEngine`."""
