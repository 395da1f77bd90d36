"""Restore validation: real objects, replayed steps, compared."""
