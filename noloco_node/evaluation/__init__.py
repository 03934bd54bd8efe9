"""Evaluations of a replica while it trains."""
