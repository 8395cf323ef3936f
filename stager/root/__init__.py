"""What runs as root on a node? Before a job and after it; the standard library alone."""
