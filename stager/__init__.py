"""Stage files to the disks of every node of a Slurm job, before its script starts.

``README.md`` in this folder shows the way of the data through the packages, and where to change
what.
"""
