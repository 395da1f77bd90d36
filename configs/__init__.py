"""Ready-to-use configurations; data only."""
