"""The studio: pages over runs, plans and data sets, in a process of its own that never imports torch."""
