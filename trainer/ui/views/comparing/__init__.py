"""Runs beside each other: what differs, curves, and what can be kept of them."""
