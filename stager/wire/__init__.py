"""How do chunks move between ranks? Without any knowledge of disks or of Slurm."""
