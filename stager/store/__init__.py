"""What is in one node's cache? Records, locks, leases, currency, space and the state of copies."""
