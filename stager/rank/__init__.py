"""What does each rank do? The MPI program, one rank a node."""
