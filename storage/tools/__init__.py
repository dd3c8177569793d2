"""Looking at a store and keeping it in order: inspect, verify, prune, pin."""
