/*
 * Lists of directives as text. All that is known of their grammar here: ';' separates directives,
 * blanks before a directive mean nothing, and a backslash escapes the character behind it.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "list.h"

/* One directive of a list; `next` is the one behind it, or NULL. */
struct item {
	const char *text;
	size_t length;
	const char *next;
};

static bool is_blank(char character)
{
	return character == ' ' || character == '\t';
}

/* Scans from the item's start, as a backslash before a ';' may be escaped itself. */
static struct item read_item(const char *at)
{
	struct item item = { 0 };

	while (is_blank(*at))
		at++;
	item.text = at;
	while (*at && *at != ';')
		at += at[0] == '\\' && at[1] ? 2 : 1;
	item.length = (size_t)(at - item.text);
	item.next = *at ? at + 1 : NULL;
	return item;
}

static bool starts_with(const char *list, const char *part)
{
	while (list && part) {
		const struct item listed = read_item(list);
		const struct item wanted = read_item(part);

		if (wanted.length == 0 || wanted.length != listed.length ||
		    memcmp(wanted.text, listed.text, wanted.length) != 0)
			return false;
		list = listed.next;
		part = wanted.next;
	}
	return !part;
}

/* Whether the directives of `part` follow each other in the list; an empty one is in no list. */
bool stage_list_contains(const char *list, const char *part)
{
	for (; list; list = read_item(list).next)
		if (starts_with(list, part))
			return true;
	return false;
}

/* Joins two lists, either of which may be empty; the caller frees it. NULL if out of memory. */
char *stage_list_join(const char *first, const char *second)
{
	const char *between = first[0] && second[0] ? ";" : "";
	char *joined = NULL;

	return asprintf(&joined, "%s%s%s", first, between, second) < 0 ? NULL : joined;
}
