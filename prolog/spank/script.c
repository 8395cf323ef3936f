/*
 * Finds #STAGE lines in the head of a batch script, which is the comment lines before its first
 * command, and #SBATCH --stage lines that sbatch may have cut at a second '#'.
 * stager/request/script.py reads them. It decodes the script and knows the white space of
 * Unicode; here every byte that may belong to such a character counts as white space. So a line may
 * be found that Python takes for a comment, but no line that it takes for a directive is missed.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "script.h"

enum kind { KIND_COMMENT, KIND_STAGE, KIND_COMMAND };

static bool may_be_blank(char character)
{
	return (unsigned char)character <= ' ' || (unsigned char)character >= 0x80;
}

static bool begins_with(const char *line, size_t length, const char *word)
{
	return length >= strlen(word) && memcmp(line, word, strlen(word)) == 0;
}

static bool may_be_cut(const char *line, size_t length)
{
	static const char mark[] = "#SBATCH";
	static const char option[] = "--stage";

	return begins_with(line, length, mark) && memchr(line + 1, '#', length - 1) &&
	       memmem(line, length, option, strlen(option));
}

static enum kind kind_of_line(const char *line, size_t length)
{
	static const char mark[] = "#STAGE";
	size_t at = 0;

	if (begins_with(line, length, mark) &&
	    (length == strlen(mark) || may_be_blank(line[strlen(mark)])))
		return KIND_STAGE;
	if (may_be_cut(line, length))
		return KIND_STAGE;
	while (at < length && may_be_blank(line[at]))
		at++;
	return at < length && line[at] != '#' ? KIND_COMMAND : KIND_COMMENT;
}

/*
 * The #STAGE lines of the script's head, one behind the other; the caller frees them. NULL if it
 * has none, or if memory is short.
 */
char *stage_script_lines(const char *path)
{
	FILE *script = fopen(path, "re");
	char *lines = NULL;
	char *line = NULL;
	size_t used = 0;
	size_t size = 0;
	ssize_t length = 0;

	while (script && (length = getline(&line, &size, script)) >= 0) {
		const enum kind kind = kind_of_line(line, (size_t)length);
		char *longer = NULL;

		if (kind == KIND_COMMAND)
			break;
		if (kind != KIND_STAGE)
			continue;
		longer = realloc(lines, used + (size_t)length + 1);
		if (!longer)
			break;
		lines = longer;
		memcpy(lines + used, line, (size_t)length + 1);
		used += (size_t)length;
	}
	free(line);
	if (script)
		(void)fclose(script); /* nothing was written */
	return lines;
}

/* Whether the script may have such lines. If it cannot be read to its end, it may. */
bool stage_script_may_stage(const char *path)
{
	FILE *script = fopen(path, "re");
	char *line = NULL;
	size_t size = 0;
	ssize_t length = 0;
	enum kind kind = KIND_COMMENT;
	bool found = false;

	if (!script)
		return false; /* the user cannot read the script, so it will not run either */
	while (kind == KIND_COMMENT && (length = getline(&line, &size, script)) >= 0)
		kind = kind_of_line(line, (size_t)length);
	found = kind == KIND_STAGE || (length < 0 && !feof(script));
	free(line);
	(void)fclose(script); /* nothing was written */
	return found;
}
