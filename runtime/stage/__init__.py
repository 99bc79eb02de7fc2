"""What a pipeline stage keeps and hands over between passes: inputs, weight gradients, activations."""
