"""Serving of requests: queue, batches, generations, streams and background jobs."""
