"""Stage files to the disks of every node of a Slurm job, before its script starts.

Read the modules in the order in which the data passes through them:

``directive`` → ``policy`` → ``request`` → ``job`` → ``launch`` → ``rank`` → ``survey`` →
``plan`` → ``transfer`` → ``store`` → ``manifest`` → ``report``, and later ``status``.
"""
