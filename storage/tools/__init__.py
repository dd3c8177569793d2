"""Maintenance of a store: inspect, verify, prune, pin."""
