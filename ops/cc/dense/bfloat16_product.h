// Matrix products in bfloat16 with sums in float32, by AVX-512's instruction for it (avx512_bf16).
#pragma once

#include <cstdint>
#include <vector>

#include "ops/cc/lifecycle/parallel.h"

namespace ctr {

// Whether this processor has the instruction; without it nothing below may be called.
bool HasBfloat16Products();

// A matrix as it lies in memory, by rows, and how it is meant.
struct Matrix {
  const float* data;
  int64_t rows;  // as it lies
  int64_t columns;
  int64_t stride;  // from a row to the next
  bool transposed = false;
  // Lies as data does; null: none. An element whose gate is not above 0 counts as 0: the gradient
  // of a rectified product is such a matrix.
  const float* gate = nullptr;

  int64_t Rows() const { return transposed ? columns : rows; }
  int64_t Columns() const { return transposed ? rows : columns; }
};

// int32s that Pack needs for b.
int64_t PackedSize(const Matrix& b);

// Rounds b to bfloat16, to nearest, ties to even, and lays it out as Multiply reads it.
//
// packed: aligned to 64 bytes, of PackedSize(b).
// column_sums: null, or where the sums over b's rows go, in float32; b is not transposed then.
void Pack(const Matrix& b, const ParallelFor& parallel_for, int32_t* packed,
          float* column_sums = nullptr);

// A term of a sum of products, a b. Where there are several results, b has a part for each, side by
// side.
struct Term {
  Matrix a;
  std::vector<const int32_t*> b;  // of each result, by Pack
};

struct Result {
  float* data;
  int64_t columns;
  int64_t stride;               // from a row to the next
  const float* bias = nullptr;  // [columns], added to each row; null: none
  bool rectified = false;       // whether max(0, ·) is taken in the end
};

// Results, side by side, of the sum of the terms, whose a are rounded as Pack rounds. An element is
// summed in an order that depends on the terms' inner sizes alone, whatever the threads and however
// many rows there are. Denormal numbers count as 0.
//
// rows: of each a, and of the results.
void Multiply(const std::vector<Term>& terms, int64_t rows, const std::vector<Result>& results,
              const ParallelFor& parallel_for);

}  // namespace ctr
