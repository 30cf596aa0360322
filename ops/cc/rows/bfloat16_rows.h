// Rows that are kept in bfloat16: a row is widened to float32, takes its step there, and is rounded
// on the way back.
#pragma once

#include <cstdint>

namespace ctr {

// Where a step's random numbers come from: a pure function of (seed, step), for all keys.
uint64_t RoundingSeed(uint64_t seed, int64_t step);

// x[i] = the number that bits[i] says.
void Widen(const uint16_t* bits, int n, float* x);

// Rounds to nearest, ties to even.
void RoundToNearest(const float* x, int n, uint16_t* bits);

// Rounds each x[i] to one of the two numbers around it, up with the chance that makes the mean of
// many roundings x[i] itself; what bfloat16 can say stays as it is. Element i depends on
// (rounding_seed, key, i) alone: 16 bits of a 64-bit hash for each, four of one hash.
void RoundByChance(const float* x, int n, uint64_t rounding_seed, int64_t key, uint16_t* bits);

}  // namespace ctr
