/* The network's limit: only an MPI_Bcast of the same bytes, from memory to memory. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(int argc, char **argv)
{
	const long long size = argc > 1 ? atoll(argv[1]) : 1LL << 30;
	const long long chunk = argc > 2 ? atoll(argv[2]) : 4LL << 20;
	char *buffer = malloc((size_t)chunk);
	double begun;
	int rank;

	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	if (!buffer)
		MPI_Abort(MPI_COMM_WORLD, 1);
	memset(buffer, rank, (size_t)chunk);
	MPI_Barrier(MPI_COMM_WORLD);
	begun = MPI_Wtime();
	for (long long sent = 0; sent < size; sent += chunk)
		MPI_Bcast(buffer, (int)(size - sent < chunk ? size - sent : chunk), MPI_BYTE, 0,
			  MPI_COMM_WORLD);
	MPI_Barrier(MPI_COMM_WORLD);
	if (rank == 0)
		printf("%.6f\n", MPI_Wtime() - begun);
	MPI_Finalize();
	free(buffer);
	return 0;
}
