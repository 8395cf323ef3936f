"""Which nodes are meant, and how are ranks started on them?

`job` finds the nodes. Each launcher is a module with a pure function that returns its argument
list: `srun` in a job, `mpiexec` on one machine; others, such as flux or an mpiexec with a hostfile,
belong beside them. `run` starts the ranks by one of these lists, `gather` asks nodes for an answer.
"""
