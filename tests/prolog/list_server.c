/*
 * Answers questions about lists of directives, for test_list.py. Reads pairs of NUL-terminated
 * strings, a list and a part; writes '1' for each list that contains its part, else '0'.
 */
#include <stdio.h>
#include <stdlib.h>

#include "list.h"

int main(void)
{
	char *list = NULL;
	char *part = NULL;
	size_t list_size = 0;
	size_t part_size = 0;

	while (getdelim(&list, &list_size, '\0', stdin) > 0 &&
	       getdelim(&part, &part_size, '\0', stdin) > 0)
		if (putchar(stage_list_contains(list, part) ? '1' : '0') == EOF ||
		    fflush(stdout) != 0)
			return 1;
	free(list);
	free(part);
	return 0;
}
