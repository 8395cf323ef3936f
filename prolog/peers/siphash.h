/* SipHash-2-4 with an output of 128 bits: a keyed digest for short messages. */
#ifndef STAGE_SIPHASH_H
#define STAGE_SIPHASH_H

#include <stddef.h>
#include <stdint.h>

#define STAGE_KEY_SIZE 16
#define STAGE_TAG_SIZE 16

void stage_siphash(const uint8_t key[STAGE_KEY_SIZE], const uint8_t *data, size_t size,
		   uint8_t tag[STAGE_TAG_SIZE]);

#endif
