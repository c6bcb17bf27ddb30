"""The development package that measures: one module a subject."""
