"""The queue: which run may use which GPU when. No torch."""
