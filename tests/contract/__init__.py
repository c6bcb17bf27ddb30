"""Contracts of every family and method: tests that name no family."""
