"""Which nodes are meant, and how are ranks started on them?

`job` finds the nodes of a job of Slurm, `choose` all others. Each launcher is a module with a pure
function that returns its argument list: `srun` in a job, `mpiexec` on one machine, and `openmpi`,
`hydra` and `flux` without Slurm. `run` starts the ranks by one of these lists, `gather` asks nodes
for an answer.
"""
