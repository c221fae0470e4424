"""Readers of the data that the scripts train and evaluate on."""
