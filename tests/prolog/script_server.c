/*
 * Answers questions about batch scripts, for test_script.py. Reads NUL-terminated paths; writes '1'
 * for each script that may have #STAGE lines, else '0'.
 */
#include <stdio.h>
#include <stdlib.h>

#include "script.h"

int main(void)
{
	char *path = NULL;
	size_t size = 0;

	while (getdelim(&path, &size, '\0', stdin) > 0)
		if (putchar(stage_script_may_stage(path) ? '1' : '0') == EOF || fflush(stdout) != 0)
			return 1;
	free(path);
	return 0;
}
