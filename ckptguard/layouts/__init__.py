"""One framework a file: how files become a checkpoint."""
