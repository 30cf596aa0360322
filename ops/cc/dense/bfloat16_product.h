// Matrix products in bfloat16 with sums in float32, by AMX where the processor has it and the
// kernel permits it, else by AVX-512's instruction (avx512_bf16). They differ only by the order of
// sums.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/cc/lifecycle/parallel.h"

namespace ctr {

// Returns whether this processor has the instruction; without it, call nothing below.
bool HasBfloat16Products();

// A matrix, or the transpose of one, whose rows lie in memory `stride` floats apart.
struct Matrix {
  const float* data;
  int64_t rows;  // in memory
  int64_t columns;
  int64_t stride;  // floats from a row to the next
  bool transposed = false;
  // A number for each element, laid out like data, or null. An element whose number is not above 0
  // counts as 0. The gradient of a rectified product is such a matrix.
  const float* gate = nullptr;

  int64_t Rows() const { return transposed ? columns : rows; }
  int64_t Columns() const { return transposed ? rows : columns; }
};

// Returns how many int32s Pack needs for b.
int64_t PackedSize(const Matrix& b);

// Rounds b to the nearest bfloat16, ties to even, and stores it in the layout that Multiply reads.
//
// packed: receives b; PackedSize(b) int32s, aligned to 64 bytes.
// column_sums: null, or receives the sums over b's rows in float32; b must not be transposed then.
void Pack(const Matrix& b, const ParallelFor& parallel_for, int32_t* packed,
          float* column_sums = nullptr);

// A term a·b of a sum of products. If there are several results, b is cut into their columns.
struct Term {
  Matrix a;
  std::vector<const int32_t*> b;  // the columns of each result, packed by Pack
};

struct Result {
  float* data;
  int64_t columns;
  int64_t stride;               // floats from a row to the next
  const float* bias = nullptr;  // [columns], added to each row; null: none
  bool rectified = false;       // whether negative elements become 0
};

// Computes the sum of the terms; its columns are those of all results, side by side. It rounds each
// a as Pack rounds b. The order of summation depends only on the terms' inner sizes, not on threads
// or rows. Denormal numbers count as 0.
//
// rows: the number of rows of each a and of each result.
void Multiply(const std::vector<Term>& terms, int64_t rows, const std::vector<Result>& results,
              const ParallelFor& parallel_for);

}  // namespace ctr
