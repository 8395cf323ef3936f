"""How do chunks move between ranks? These modules know neither disks nor Slurm."""
