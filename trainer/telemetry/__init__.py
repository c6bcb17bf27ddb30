"""What a run tells the outside, and how the outside stops it. Never imports torch."""
