/* The lines of a batch script that the plugin must know of. Needs no header of Slurm. */
#ifndef STAGE_SCRIPT_H
#define STAGE_SCRIPT_H

#include <stdbool.h>

bool stage_script_may_stage(const char *path);
char *stage_script_lines(const char *path);

#endif
