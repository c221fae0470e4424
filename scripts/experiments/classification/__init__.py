"""Texts with labels of one's own: readers, metrics, predictions."""
