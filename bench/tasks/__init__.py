"""Generated, seeded tasks: training batches and held-out ledgers."""
