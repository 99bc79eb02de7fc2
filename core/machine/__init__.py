"""What work runs on and what is trained: the cluster, how processes are laid out, the model's shape."""
