/* Lists of directives, joined by ';'. Needs no header of Slurm. */
#ifndef STAGE_LIST_H
#define STAGE_LIST_H

#include <stdbool.h>

bool stage_list_contains(const char *list, const char *part);
char *stage_list_join(const char *first, const char *second);

#endif
