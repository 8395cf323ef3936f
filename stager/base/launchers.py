"""Name what may start ranks, for the command line and for `launch.choose`."""

#: Slurm, and the others in the order in which the environment is asked whether it is one of theirs.
SLURM = "slurm"
OTHERS = ("flux", "pbs", "lsf", "dstack", "kubernetes")
LAUNCHERS = (SLURM, *OTHERS)
#: The variable that names the interfaces that Open MPI uses, or their networks, with commas.
INTERFACES = "OMPI_MCA_btl_tcp_if_include"
#: The variables that name the interface for libfabric's two kinds of TCP; MPICH uses one of them.
LIBFABRIC_INTERFACES = ("FI_TCP_IFACE", "FI_SOCKETS_IFACE")
