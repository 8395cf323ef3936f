"""Which nodes are meant, and how are ranks started on them?

`targets` runs a request on nodes: `job` finds those of a Slurm job, `schedulers` all others. Each
launcher has a pure function that returns its argument list: `srun` in a job, `mpiexec` and
`schedulers` without Slurm. `run` starts the ranks by one of these lists. `nodes` asks nodes for an
answer.
"""
