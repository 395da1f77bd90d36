"""Checkpoint reliability: audits, restores and proves PyTorch training checkpoints before you resume from them."""
