"""Plans on DeepSpeed's pipelines: stages of a Hugging Face model, driven through its `PipelineEngine`."""
