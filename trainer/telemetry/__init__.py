"""Reports of a run to the outside, and how the outside stops it. Never imports torch."""
