"""The demonstration: a real training, proven, damaged, caught."""
