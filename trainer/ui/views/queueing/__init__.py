"""Views of the queue on the home page, and what can be asked of its jobs."""
