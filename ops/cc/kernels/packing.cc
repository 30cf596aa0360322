// Packs rows, and later their gradients, for one all-to-all each between the ranks that read the
// rows and the ranks that own them.
//
// A buffer has a block for each of the N ranks. A block of n occurrences holds n linear values; if
// they are rows, n bits, which say whether an occurrence has factors and fill whole values; then
// the factors of those that have them. So a feature without factors costs its linear value and a
// bit. Values have the type T: float, half or bfloat16.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "ops/cc/kernels/row_store_kernels.h"
#include "ops/cc/lifecycle/policy.h"
#include "tensorflow/core/framework/register_types.h"

namespace ctr {
namespace {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;

template <typename T>
constexpr int64_t kBits = 8 * sizeof(T);

template <typename T>
int64_t MaskWords(int64_t n) {
  return (n + kBits<T> - 1) / kBits<T>;
}

// Returns the i-th bit of a mask, whatever the type of its words.
template <typename T>
bool MaskBit(const T* mask, int64_t i) {
  return reinterpret_cast<const unsigned char*>(mask)[i / 8] >> (i % 8) & 1;
}

template <typename From, typename To>
void Convert(const From* from, int64_t n, To* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<To>(from[i]);
}
void Convert(const float* from, int64_t n, float* to) {
  // Most rows have some 16 values. For these a call of memcpy would take longer than the copy.
  for (; n >= 16 && n < 256; n -= 16, from += 16, to += 16)
    std::memcpy(to, from, 16 * sizeof(float));
  if (n > 0) std::memcpy(to, from, sizeof(float) * n);
}

template <typename T>
void Add(const T* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; ++i) to[i] += static_cast<float>(from[i]);
}

// Checks counts [N]: none is negative, and their sum is `total`.
absl::Status CheckCounts(const Tensor& counts, const char* name, int64_t total) {
  TF_RETURN_IF_ERROR(CheckVector(counts, name));
  const auto at = counts.flat<int32_t>();
  int64_t sum = 0;
  for (int64_t s = 0; s < at.size(); ++s) {
    if (at(s) < 0 || at(s) > total) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, "[", s, "]: found ", at(s), "; wanted a number in [0, ", total, "]"));
    }
    sum += at(s);
  }
  if (sum == total) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, ": found a sum of ", sum, "; wanted ", total));
}

absl::Status CheckBufferSize(int64_t found, int64_t wanted) {
  if (found == wanted) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("buffer: found ", found, " values; wanted ", wanted));
}

absl::Status CheckFits(int64_t values) {
  if (values <= std::numeric_limits<int32_t>::max()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("buffer: would hold ", values, " values; wanted at most 2^31 - 1"));
}

template <typename T>
class PackRowsOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const Tensor &linear = context->input(0), &factors = context->input(1),
                 &offsets = context->input(2), &inverse = context->input(3),
                 &counts = context->input(4);
    OP_REQUIRES_OK(context, CheckVector(linear, "linear"));
    OP_REQUIRES_OK(context, CheckVector(factors, "factors"));
    OP_REQUIRES_OK(context, CheckVector(inverse, "inverse"));
    const int64_t u = linear.dim_size(0), n = inverse.dim_size(0);
    OP_REQUIRES_OK(context, CheckOffsets(offsets, "offsets", u, factors.dim_size(0)));
    OP_REQUIRES_OK(context, CheckIndices(inverse, "inverse", u));
    OP_REQUIRES_OK(context, CheckCounts(counts, "counts", n));
    const int64_t ranks = counts.dim_size(0);
    const float *w = linear.flat<float>().data(), *v = factors.flat<float>().data();
    const int32_t *offset = offsets.flat<int32_t>().data(),
                  *unique = inverse.flat<int32_t>().data();
    const int32_t* count = counts.flat<int32_t>().data();
    Tensor* splits;
    OP_REQUIRES_OK(context, context->allocate_output(1, {ranks}, &splits));
    const std::unique_ptr<int32_t[]> place(new int32_t[n]);  // where an occurrence's factors go
    int64_t total = 0, i = 0;
    for (int64_t s = 0; s < ranks; ++s) {
      const int64_t begin = total;
      total += count[s] + MaskWords<T>(count[s]);
      for (int64_t k = 0; k < count[s]; ++k, ++i) {
        place[i] = static_cast<int32_t>(total);
        total += offset[unique[i] + 1] - offset[unique[i]];
      }
      OP_REQUIRES_OK(context, CheckFits(total));
      splits->flat<int32_t>()(s) = static_cast<int32_t>(total - begin);
    }
    Tensor* buffer;
    OP_REQUIRES_OK(context, context->allocate_output(0, {total}, &buffer));
    T* const out = buffer->flat<T>().data();
    i = 0;
    int64_t at = 0;
    for (int64_t s = 0; s < ranks; ++s) {
      T* const block = out + at;
      unsigned char* const mask = reinterpret_cast<unsigned char*>(block + count[s]);
      std::memset(mask, 0, sizeof(T) * MaskWords<T>(count[s]));
      for (int64_t k = 0; k < count[s]; ++k, ++i) {
        block[k] = static_cast<T>(w[unique[i]]);
        if (offset[unique[i] + 1] > offset[unique[i]])
          mask[k / 8] |= static_cast<unsigned char>(1 << (k % 8));
      }
      at += splits->flat<int32_t>()(s);
    }
    ParallelForOf(context)(n, 20, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        if (i + 8 < end) __builtin_prefetch(v + offset[unique[i + 8]]);
        Convert(v + offset[unique[i]], offset[unique[i] + 1] - offset[unique[i]], out + place[i]);
      }
    });
  }
};

template <typename T>
class UnpackRowsOp : public tensorflow::OpKernel {
 public:
  explicit UnpackRowsOp(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    std::vector<int> slot_table, widths;
    OP_REQUIRES_OK(context, context->GetAttr("slot_table", &slot_table));
    OP_REQUIRES_OK(context, context->GetAttr("widths", &widths));
    layout_.slot_table = slot_table;
    layout_.tables.resize(widths.size());
    for (size_t t = 0; t < widths.size(); ++t) layout_.tables[t].width = widths[t];
    const std::string wrong = layout_.Check();
    OP_REQUIRES(context, wrong.empty(), absl::InvalidArgumentError(wrong));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor &buffer = context->input(0), &counts = context->input(1),
                 &keys = context->input(2);
    OP_REQUIRES_OK(context, CheckVector(buffer, "buffer"));
    OP_REQUIRES_OK(context, CheckVector(keys, "keys"));
    const int64_t u = keys.dim_size(0), ranks = counts.dim_size(0), size = buffer.dim_size(0);
    OP_REQUIRES_OK(context, CheckCounts(counts, "counts", u));
    OP_REQUIRES_OK(context, CheckFits(size));
    const int32_t* count = counts.flat<int32_t>().data();
    const int64_t* key = keys.flat<int64_t>().data();
    const T* const in = buffer.flat<T>().data();
    Tensor *linear, *offsets, *factors;
    OP_REQUIRES_OK(context, context->allocate_output(0, {u}, &linear));
    OP_REQUIRES_OK(context, context->allocate_output(2, {u + 1}, &offsets));
    float* const w = linear->flat<float>().data();
    int32_t* const offset = offsets->flat<int32_t>().data();
    std::vector<int64_t> place(ranks);  // where the factors of a block begin
    int64_t at = 0, j = 0;
    offset[0] = 0;
    for (int64_t s = 0; s < ranks; ++s) {
      place[s] = at + count[s] + MaskWords<T>(count[s]);
      OP_REQUIRES(context, place[s] <= size, CheckBufferSize(size, place[s]));
      const T* const mask = in + at + count[s];
      const int64_t first = offset[j];
      for (int64_t k = 0; k < count[s]; ++k, ++j) {
        w[j] = static_cast<float>(in[at + k]);
        int width = 0;
        if (MaskBit(mask, k)) {
          const int table = layout_.TableOf(key[j]);
          OP_REQUIRES(
              context, table >= 0,
              absl::InvalidArgumentError(absl::StrCat("keys[", j, "]: found ", key[j],
                                                      "; wanted a key whose slot has a table")));
          width = layout_.tables[table].width;
        }
        OP_REQUIRES(context, width <= size - offset[j], CheckBufferSize(size, offset[j] + width));
        offset[j + 1] = offset[j] + width;
      }
      at = place[s] + offset[j] - first;
      OP_REQUIRES(context, at <= size, CheckBufferSize(size, at));
    }
    OP_REQUIRES_OK(context, CheckBufferSize(size, at));
    OP_REQUIRES_OK(context, context->allocate_output(1, {offset[u]}, &factors));
    float* const v = factors->flat<float>().data();
    j = 0;
    for (int64_t s = 0; s < ranks; ++s) {
      const int64_t begin = offset[j];
      j += count[s];
      const int64_t values = offset[j] - begin;
      Convert(in + place[s], values, v + begin);
    }
  }

 private:
  RowLayout layout_;  // only its widths and slots are used
};

template <typename T>
class PackGradientsOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const Tensor &linear = context->input(0), &factors = context->input(1),
                 &offsets = context->input(2), &counts = context->input(3);
    OP_REQUIRES_OK(context, CheckVector(linear, "linear_grad"));
    OP_REQUIRES_OK(context, CheckVector(factors, "factors_grad"));
    const int64_t u = linear.dim_size(0), total = u + factors.dim_size(0);
    OP_REQUIRES_OK(context, CheckOffsets(offsets, "offsets", u, factors.dim_size(0)));
    OP_REQUIRES_OK(context, CheckCounts(counts, "counts", u));
    OP_REQUIRES_OK(context, CheckFits(total));
    Tensor *buffer, *splits;
    OP_REQUIRES_OK(context, context->allocate_output(0, {total}, &buffer));
    OP_REQUIRES_OK(context, context->allocate_output(1, {counts.dim_size(0)}, &splits));
    const int32_t* offset = offsets.flat<int32_t>().data();
    T* out = buffer->flat<T>().data();
    int64_t j = 0;
    for (int64_t s = 0; s < counts.dim_size(0); ++s) {
      const int64_t n = counts.flat<int32_t>()(s), values = offset[j + n] - offset[j];
      Convert(linear.flat<float>().data() + j, n, out);
      Convert(factors.flat<float>().data() + offset[j], values, out + n);
      splits->flat<int32_t>()(s) = static_cast<int32_t>(n + values);
      out += n + values;
      j += n;
    }
  }
};

template <typename T>
class SumGradientsOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const Tensor &buffer = context->input(0), &counts = context->input(1),
                 &offsets = context->input(2), &inverse = context->input(3),
                 &starts = context->input(4), &order = context->input(5);
    OP_REQUIRES_OK(context, CheckVector(buffer, "buffer"));
    OP_REQUIRES_OK(context, CheckVector(offsets, "offsets"));
    OP_REQUIRES_OK(context, CheckVector(inverse, "inverse"));
    OP_REQUIRES(context, offsets.dim_size(0) >= 1,
                absl::InvalidArgumentError("offsets: found shape [0]; wanted [u + 1]"));
    const int64_t u = offsets.dim_size(0) - 1, n = inverse.dim_size(0), ranks = counts.dim_size(0);
    const int32_t* offset = offsets.flat<int32_t>().data();
    OP_REQUIRES_OK(context, CheckOffsets(offsets, "offsets", u, offset[u]));
    OP_REQUIRES_OK(context, CheckIndices(inverse, "inverse", u));
    OP_REQUIRES_OK(context, CheckOffsets(starts, "starts", u, n));
    OP_REQUIRES_OK(context, CheckLength(order, "order", n));
    OP_REQUIRES_OK(context, CheckIndices(order, "order", n));
    OP_REQUIRES_OK(context, CheckCounts(counts, "counts", n));
    OP_REQUIRES_OK(context, CheckFits(buffer.dim_size(0)));
    const int32_t *unique = inverse.flat<int32_t>().data(), *start = starts.flat<int32_t>().data(),
                  *position = order.flat<int32_t>().data();
    // Where the gradients of an occurrence lie.
    const std::unique_ptr<int32_t[]> linear_at(new int32_t[n]), factors_at(new int32_t[n]);
    int64_t at = 0, i = 0;
    for (int64_t s = 0; s < ranks; ++s) {
      const int64_t count = counts.flat<int32_t>()(s), linear = at - i;
      at += count;
      for (int64_t k = 0; k < count; ++k, ++i) {
        linear_at[i] = static_cast<int32_t>(linear + i);
        factors_at[i] = static_cast<int32_t>(at);
        at += offset[unique[i] + 1] - offset[unique[i]];
      }
    }
    OP_REQUIRES_OK(context, CheckBufferSize(buffer.dim_size(0), at));
    Tensor *linear_grad, *factors_grad;
    OP_REQUIRES_OK(context, context->allocate_output(0, {u}, &linear_grad));
    OP_REQUIRES_OK(context, context->allocate_output(1, {offset[u]}, &factors_grad));
    const T* const in = buffer.flat<T>().data();
    float *w = linear_grad->flat<float>().data(), *v = factors_grad->flat<float>().data();
    const int64_t width = u == 0 ? 0 : offset[u] / u;
    ParallelForOf(context)(u, 20 + 2 * width, [&](int64_t begin, int64_t end) {
      for (int64_t j = begin; j < end; ++j) {
        const int64_t width = offset[j + 1] - offset[j];
        float sum = 0.0f;
        bool first = true;
        for (int64_t z = start[j]; z < start[j + 1]; ++z) {
          const int32_t i = position[z];
          sum += static_cast<float>(in[linear_at[i]]);
          if (unique[i] != j)
            continue;  // an order that names another key's occurrence would read beyond the buffer
          if (first) {
            Convert(in + factors_at[i], width, v + offset[j]);
          } else {
            Add(in + factors_at[i], width, v + offset[j]);
          }
          first = false;
        }
        w[j] = sum;
        if (first) std::fill_n(v + offset[j], width, 0.0f);
      }
    });
  }
};

#define REGISTER(T)                                                                              \
  REGISTER_KERNEL_BUILDER(                                                                       \
      Name("CtrPackRows").Device(tensorflow::DEVICE_CPU).TypeConstraint<T>("T"), PackRowsOp<T>); \
  REGISTER_KERNEL_BUILDER(                                                                       \
      Name("CtrUnpackRows").Device(tensorflow::DEVICE_CPU).TypeConstraint<T>("T"),               \
      UnpackRowsOp<T>);                                                                          \
  REGISTER_KERNEL_BUILDER(                                                                       \
      Name("CtrPackGradients").Device(tensorflow::DEVICE_CPU).TypeConstraint<T>("T"),            \
      PackGradientsOp<T>);                                                                       \
  REGISTER_KERNEL_BUILDER(                                                                       \
      Name("CtrSumGradients").Device(tensorflow::DEVICE_CPU).TypeConstraint<T>("T"),             \
      SumGradientsOp<T>);
REGISTER(float);
REGISTER(Eigen::half);
REGISTER(Eigen::bfloat16);
#undef REGISTER

}  // namespace
}  // namespace ctr
