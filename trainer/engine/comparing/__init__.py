"""Real runs of several configurations, alternating, and what differs between them. No torch."""
