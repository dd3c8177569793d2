"""Requests on their way: queue, batches, sessions over one prefix, streams and generations."""
