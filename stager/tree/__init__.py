"""How is a folder listed, streamed and rebuilt? Without MPI."""
