"""The recorder: what a training loop writes down so that its checkpoints can be proven later."""
