"""Reports of a run to the outside, and the signals by which the outside stops it. Never imports torch."""
