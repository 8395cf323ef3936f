"""What is in one node's cache? Files, records, locks and the uses of running jobs."""
