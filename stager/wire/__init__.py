"""How do chunks and messages move between ranks? These modules know neither disks nor Slurm."""
