// Matrix products in bfloat16 with sums in float32, by AVX-512's instruction for it (avx512_bf16).
#pragma once

#include <cstdint>

#include "ops/cc/lifecycle/parallel.h"

namespace ctr {

// Whether this processor has the instruction; without it nothing below may be called.
bool HasBfloat16Products();

// A matrix as it lies in memory, by rows, and whether its transpose is meant.
struct Matrix {
  const float* data;
  int64_t rows;  // as it lies
  int64_t columns;
  bool transposed;
};

// uint16s that `packed` below has room for.
int64_t PackedSize(const Matrix& b);

// c = a b. Factors are rounded to bfloat16, to nearest, ties to even; an element of c is summed in
// an order that depends on the inner size alone, whatever the threads and however many rows a has.
// Denormal numbers count as 0.
//
// packed: aligned to 64 bytes, of PackedSize(b); what it holds before and after means nothing.
void Bfloat16Product(const Matrix& a, const Matrix& b, const ParallelFor& parallel_for,
                     uint16_t* packed, float* c);

}  // namespace ctr
