// Rows that are kept in bfloat16: a row is widened to float32 for a step, and rounded afterwards.
#pragma once

#include <cstdint>

namespace ctr {

// Returns the seed of a step's random numbers, for all keys; it depends only on (seed, step).
uint64_t RoundingSeed(uint64_t seed, int64_t step);

// Sets x[i] to the bfloat16 number with bits[i].
void Widen(const uint16_t* bits, int n, float* x);

// Rounds each x[i] to the nearest bfloat16, ties to even.
void RoundToNearest(const float* x, int n, uint16_t* bits);

// Rounds each x[i] at random to one of the two bfloat16 numbers around it, with such chances that
// the mean of many roundings is x[i] itself. A number that bfloat16 can hold stays as it is.
// Element i depends only on (rounding_seed, key, i): a 64-bit hash gives 16 bits to each of four
// elements.
void RoundByChance(const float* x, int n, uint64_t rounding_seed, int64_t key, uint16_t* bits);

}  // namespace ctr
