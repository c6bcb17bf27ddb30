"""Launchers of clusters, by the clusters' own clients. No torch."""
