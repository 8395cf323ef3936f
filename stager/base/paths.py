"""Name the files and folders that slurm-stage itself makes on a node, and what may start ranks.

Root's programs import this module, so it imports nothing. The plugin has the same folders in
``prolog/spank/stage.h``.
"""

from __future__ import annotations

#: Where the plugin and stagectl look for the site's configuration by default.
SITE_CONFIG = "/etc/slurm/stage.toml"
#: The folder beneath each cache root that holds one folder of records for each user.
RECORDS_FOLDER = ".slurm-stage"
#: The folder of a user's entries in the node's store, beside the records of them.
STORE_FOLDER = "store"
#: The parent and the name of `RUN_FOLDER`, for root's programs, which open it step by step.
RUN, RUN_NAME = "/run", "slurm-stage"
#: One room for each user, in which the ranks leave the status of a stage for the job's other
#: steps, and what the job uses. A reboot empties it.
RUN_FOLDER = f"{RUN}/{RUN_NAME}"
#: One file ``JOB.UID`` for each job that stages on this node and has not ended here. It is root's,
#: who alone may look into it.
JOBS_FOLDER = f"{RUN_FOLDER}/jobs"
#: Root's folder of notes about the filesystems of jobs' disks, by job, see `stager.node.shared_fs`.
SHARED_NOTES = f"{RUN_FOLDER}/shared"
#: The folder, on a disk of each node, in which such a filesystem keeps its data, by job.
SHARED_FOLDER = ".slurm-stage-shared"
#: The file in each node's part of a folder, with mode=shard, that lists which node has which file.
SHARD_LIST = ".stage-shards.tsv"
#: The file at the top of every virtual environment of Python.
VENV_CONFIG = b"pyvenv.cfg"
#: Where `packaging/install` puts the library that ranks preload, beneath its prefix.
PEERS_LIBRARY = "lib/stage_peers.so"
#: The variable in which that library finds the key of a stage.
PEERS_KEY = "STAGE_PEER_KEY"
#: One of the scripts that it puts there, too, and pip does not.
SITE_SCRIPT = "libexec/job_epilog"


def pattern_hint(path: str) -> str:
    """Return what to do if a missing ``path`` was meant as a pattern; empty if it has no ``*?``.

    >>> pattern_hint("/shared/set/*.bin")
    'patterns are not expanded: stage /shared/set with the option include=*.bin'
    >>> pattern_hint("/shared/set/*")
    'patterns are not expanded: stage the folder /shared/set'
    """
    before = path.partition("*")[0].partition("?")[0]
    if before == path:
        return ""
    folder = before.rpartition("/")[0]
    pattern = path[len(folder) + 1 :]
    what = f"{folder or '/'} with the option include={pattern}"
    if pattern == "*":
        what = f"the folder {folder or '/'}"
    return f"patterns are not expanded: stage {what}"


#: Slurm, and the others in the order in which the environment is asked whether it is one of theirs.
SLURM = "slurm"
OTHERS = ("flux", "pbs", "lsf", "dstack", "kubernetes")
LAUNCHERS = (SLURM, *OTHERS)
#: The variable that names the interfaces that Open MPI uses, or their networks, with commas.
INTERFACES = "OMPI_MCA_btl_tcp_if_include"
#: The variables that name the interface for libfabric's two kinds of TCP; MPICH uses one of them.
LIBFABRIC_INTERFACES = ("FI_TCP_IFACE", "FI_SOCKETS_IFACE")
