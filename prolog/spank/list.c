/* Lists of directives as text. Their grammar is not known here, only that ';' joins them. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "stage.h"

/* Whether `part`, one directive or several in a row, is in the list; an empty one never is. */
bool stage_list_contains(const char *list, const char *part)
{
	const size_t length = strlen(part);

	if (length == 0)
		return false;
	for (const char *at = list; (at = strstr(at, part)); at++) {
		const bool begins = at == list || at[-1] == ';';
		const bool ends = at[length] == '\0' || at[length] == ';';

		if (begins && ends)
			return true;
	}
	return false;
}

/* The two joined, either of which may be empty; the caller frees it. NULL without memory. */
char *stage_list_join(const char *first, const char *second)
{
	const char *between = first[0] && second[0] ? ";" : "";
	char *joined = NULL;

	return asprintf(&joined, "%s%s%s", first, between, second) < 0 ? NULL : joined;
}
