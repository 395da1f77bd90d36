"""Containers, one a file: how bytes become tensors. No framework is known here."""
