// The pairs of a field-aware factorization machine, and their gradient; ops/cc/ops/ffm_ops.cc has
// the formulas. The kernels have no state; threads share the samples.
#include <cstdint>
#include <string>

#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/util/work_sharder.h"

namespace {

// <A[f, g], A[g, f]> summed over all f and g, halved. A of one sample is [fields, fields, width];
// kWidth is the width, or 0 for any.
template <int64_t kWidth>
float Pairs(const float* a, int64_t fields, int64_t any_width) {
  const int64_t width = kWidth ? kWidth : any_width;
  float diagonal = 0, above = 0;
  for (int64_t f = 0; f < fields; ++f) {
    const float* own = a + (f * fields + f) * width;
    for (int64_t d = 0; d < width; ++d) diagonal += own[d] * own[d];
    for (int64_t g = f + 1; g < fields; ++g) {
      const float* fg = a + (f * fields + g) * width;
      const float* gf = a + (g * fields + f) * width;
      float product = 0;
      for (int64_t d = 0; d < width; ++d) product += fg[d] * gf[d];
      above += product;
    }
  }
  return 0.5f * diagonal + above;
}

template <int64_t kWidth>
void PairsGrad(const float* a, float grad, int64_t fields, int64_t any_width, float* out) {
  const int64_t width = kWidth ? kWidth : any_width;
  for (int64_t f = 0; f < fields; ++f) {
    for (int64_t g = 0; g < fields; ++g) {
      const float* gf = a + (g * fields + f) * width;
      float* fg = out + (f * fields + g) * width;
      for (int64_t d = 0; d < width; ++d) fg[d] = grad * gf[d];
    }
  }
}

// Checks `factors` and reads its sizes.
absl::Status Sizes(const tensorflow::Tensor& factors, int64_t* samples, int64_t* fields,
                   int64_t* width) {
  if (factors.dims() != 3 || factors.dim_size(1) < 1 ||
      factors.dim_size(2) % factors.dim_size(1) != 0) {
    return absl::InvalidArgumentError("factors: wanted shape [B, F, F*D], found " +
                                      factors.shape().DebugString());
  }
  *samples = factors.dim_size(0);
  *fields = factors.dim_size(1);
  *width = factors.dim_size(2) / *fields;
  return absl::OkStatus();
}

// Divides the samples among threads, which call run(begin, end). A sample has `floats` factors.
template <typename Run>
void OverSamples(tensorflow::OpKernelContext* c, int64_t samples, int64_t floats, const Run& run) {
  const auto* workers = c->device()->tensorflow_cpu_worker_threads();
  tensorflow::Shard(workers->num_threads, workers->workers, samples, 2 * floats, run);
}

class FfmOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(tensorflow::OpKernelContext* c) override {
    const tensorflow::Tensor& factors = c->input(0);
    int64_t samples, fields, width;
    OP_REQUIRES_OK(c, Sizes(factors, &samples, &fields, &width));
    tensorflow::Tensor* pairs;
    OP_REQUIRES_OK(c, c->allocate_output(0, tensorflow::TensorShape({samples}), &pairs));
    const float* a = factors.flat<float>().data();
    float* out = pairs->flat<float>().data();
    const int64_t floats = fields * fields * width;
    const auto one = width == 4 ? Pairs<4> : width == 8 ? Pairs<8> : Pairs<0>;
    OverSamples(c, samples, floats, [=](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) out[b] = one(a + b * floats, fields, width);
    });
  }
};
REGISTER_KERNEL_BUILDER(Name("CtrFfm").Device(tensorflow::DEVICE_CPU), FfmOp);

class FfmGradOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(tensorflow::OpKernelContext* c) override {
    const tensorflow::Tensor& factors = c->input(0);
    const tensorflow::Tensor& grad = c->input(1);
    int64_t samples, fields, width;
    OP_REQUIRES_OK(c, Sizes(factors, &samples, &fields, &width));
    OP_REQUIRES(c, grad.dims() == 1 && grad.dim_size(0) == samples,
                absl::InvalidArgumentError("grad: wanted shape [" + std::to_string(samples) +
                                           "], found " + grad.shape().DebugString()));
    tensorflow::Tensor* factors_grad;
    OP_REQUIRES_OK(c, c->allocate_output(0, factors.shape(), &factors_grad));
    const float* a = factors.flat<float>().data();
    const float* g = grad.flat<float>().data();
    float* out = factors_grad->flat<float>().data();
    const int64_t floats = fields * fields * width;
    const auto one = width == 4 ? PairsGrad<4> : width == 8 ? PairsGrad<8> : PairsGrad<0>;
    OverSamples(c, samples, floats, [=](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b)
        one(a + b * floats, g[b], fields, width, out + b * floats);
    });
  }
};
REGISTER_KERNEL_BUILDER(Name("CtrFfmGrad").Device(tensorflow::DEVICE_CPU), FfmGradOp);

}  // namespace
