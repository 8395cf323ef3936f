/* SipHash-2-4-128, as J.-P. Aumasson and D. J. Bernstein specify it. All words are little-endian.
 */
#include "siphash.h"

#define WORD 8

struct state {
	uint64_t v0, v1, v2, v3;
};

static uint64_t load(const uint8_t *bytes, size_t size)
{
	uint64_t word = 0;

	for (size_t i = 0; i < size; i++)
		word |= (uint64_t)bytes[i] << (8 * i);
	return word;
}

static void store(uint64_t word, uint8_t *bytes)
{
	for (size_t i = 0; i < WORD; i++)
		bytes[i] = (uint8_t)(word >> (8 * i));
}

static uint64_t rotate(uint64_t word, int bits)
{
	return word << bits | word >> (64 - bits);
}

static void mix(struct state *s, int rounds)
{
	for (int i = 0; i < rounds; i++) {
		s->v0 += s->v1;
		s->v2 += s->v3;
		s->v1 = rotate(s->v1, 13) ^ s->v0;
		s->v3 = rotate(s->v3, 16) ^ s->v2;
		s->v0 = rotate(s->v0, 32);
		s->v2 += s->v1;
		s->v0 += s->v3;
		s->v1 = rotate(s->v1, 17) ^ s->v2;
		s->v3 = rotate(s->v3, 21) ^ s->v0;
		s->v2 = rotate(s->v2, 32);
	}
}

static void absorb(struct state *s, uint64_t word)
{
	s->v3 ^= word;
	mix(s, 2);
	s->v0 ^= word;
}

static uint64_t squeeze(struct state *s)
{
	mix(s, 4);
	return s->v0 ^ s->v1 ^ s->v2 ^ s->v3;
}

void stage_siphash(const uint8_t key[STAGE_KEY_SIZE], const uint8_t *data, size_t size,
		   uint8_t tag[STAGE_TAG_SIZE])
{
	const uint64_t k0 = load(key, WORD);
	const uint64_t k1 = load(key + WORD, WORD);
	struct state s = {
		k0 ^ 0x736f6d6570736575,
		k1 ^ 0x646f72616e646f6d ^ 0xee,
		k0 ^ 0x6c7967656e657261,
		k1 ^ 0x7465646279746573,
	};
	const size_t rest = size % WORD;
	const size_t whole = size - rest;

	for (size_t at = 0; at < whole; at += WORD)
		absorb(&s, load(data + at, WORD));
	absorb(&s, (uint64_t)size << 56 | load(data + whole, rest));
	s.v2 ^= 0xee;
	store(squeeze(&s), tag);
	s.v1 ^= 0xdd;
	store(squeeze(&s), tag + WORD);
}
