"""Measurements: paired end-to-end generate, and each op against the stock expression and its peers."""
