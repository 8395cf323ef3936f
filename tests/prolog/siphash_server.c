/*
 * Answers questions about SipHash, for test_peers.py. Reads pairs of NUL-terminated strings: a
 * size, and a tag in hexadecimal. Writes '1' if the tag is that of the bytes 0, 1, 2, … of this
 * size with the key 00 01 … 0f, as the published test vectors are made, else '0'.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "siphash.h"

static void write_tag(size_t size, char text[2 * STAGE_TAG_SIZE + 1])
{
	uint8_t *data = malloc(size + 1);
	uint8_t key[STAGE_KEY_SIZE];
	uint8_t tag[STAGE_TAG_SIZE];

	if (!data)
		exit(1);
	for (size_t i = 0; i < size; i++)
		data[i] = (uint8_t)i;
	for (size_t i = 0; i < sizeof(key); i++)
		key[i] = (uint8_t)i;
	stage_siphash(key, data, size, tag);
	free(data);
	for (size_t i = 0; i < sizeof(tag); i++)
		(void)snprintf(text + 2 * i, 3, "%02x", tag[i]);
}

int main(void)
{
	char *size = NULL;
	char *expected = NULL;
	size_t size_room = 0;
	size_t expected_room = 0;

	while (getdelim(&size, &size_room, '\0', stdin) > 0 &&
	       getdelim(&expected, &expected_room, '\0', stdin) > 0) {
		char text[2 * STAGE_TAG_SIZE + 1];

		write_tag(strtoul(size, NULL, 10), text);
		if (putchar(strcmp(text, expected) == 0 ? '1' : '0') == EOF || fflush(stdout) != 0)
			return 1;
	}
	free(size);
	free(expected);
	return 0;
}
