// The row optimizers and initial factors as ops on looked-up rows, for stores other than ours.
#include <algorithm>
#include <atomic>
#include <string>

#include "ops/cc/kernels/row_store_kernels.h"
#include "ops/cc/rows/initial_factors.h"

namespace ctr {
namespace {

class InitialFactorsOp : public tensorflow::OpKernel {
 public:
  explicit InitialFactorsOp(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("seed", &seed_));
    OP_REQUIRES_OK(context, context->GetAttr("width", &width_));
    OP_REQUIRES_OK(context, context->GetAttr("scale", &scale_));
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    const tensorflow::Tensor& keys = context->input(0);
    OP_REQUIRES_OK(context, CheckVector(keys, "keys"));
    const int64_t n = keys.dim_size(0);
    tensorflow::Tensor* factors;
    OP_REQUIRES_OK(context, context->allocate_output(0, {n, width_}, &factors));
    const int64_t* key = keys.flat<int64_t>().data();
    float* out = factors->flat<float>().data();
    ParallelForOf(context)(n, 20 * width_, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        InitialFactors(static_cast<uint64_t>(seed_), key[i], width_, scale_, out + i * width_);
      }
    });
  }

 private:
  int64_t seed_;
  int width_;
  float scale_;
};
REGISTER_KERNEL_BUILDER(Name("CtrInitialFactors").Device(tensorflow::DEVICE_CPU), InitialFactorsOp);

// The base class of the two kernels below: it reads the optimizer and its hyperparameters.
class RowOptimizerOpKernel : public tensorflow::OpKernel {
 public:
  explicit RowOptimizerOpKernel(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    std::string kind;
    OP_REQUIRES_OK(context, context->GetAttr("kind", &kind));
    rule_ = FindRowRule(kind);
    OP_REQUIRES(
        context, rule_ != nullptr,
        absl::InvalidArgumentError("kind: found '" + kind + "'; wanted one of " + RowRuleNames()));
  }

 protected:
  absl::Status Hyper(const tensorflow::Tensor& tensor, RowHyper* hyper) const {
    TF_RETURN_IF_ERROR(CheckLength(tensor, "hyper", kRowHyperFields));
    std::copy_n(tensor.flat<float>().data(), kRowHyperFields, reinterpret_cast<float*>(hyper));
    const std::string wrong = CheckRowHyper(rule_, *hyper);
    return wrong.empty() ? absl::OkStatus() : absl::InvalidArgumentError("hyper: " + wrong);
  }

  const RowRule* rule_;
};

absl::Status CheckMatrix(const tensorflow::Tensor& tensor, const char* name, int64_t rows,
                         int64_t columns) {
  if (tensor.shape() == tensorflow::TensorShape({rows, columns})) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(name, ": found shape ",
                                                 tensor.shape().DebugString(), "; wanted [", rows,
                                                 ", ", columns, "]"));
}

class RowInitOp : public RowOptimizerOpKernel {
 public:
  using RowOptimizerOpKernel::RowOptimizerOpKernel;

  void Compute(tensorflow::OpKernelContext* context) override {
    const tensorflow::Tensor& weights = context->input(0);
    OP_REQUIRES(context, weights.dims() == 2 && weights.dim_size(1) >= 1,
                absl::InvalidArgumentError(absl::StrCat(
                    "weights: found shape ", weights.shape().DebugString(), "; wanted [n, dim]")));
    RowHyper hyper;
    OP_REQUIRES_OK(context, Hyper(context->input(1), &hyper));
    const RowStep step(rule_, hyper, 1);
    const int64_t n = weights.dim_size(0), dim = weights.dim_size(1),
                  stride = dim + RowStateFloats(rule_, dim);
    tensorflow::Tensor* rows;
    OP_REQUIRES_OK(context, context->allocate_output(0, {n, stride}, &rows));
    const float* w = weights.flat<float>().data();
    float* row = rows->flat<float>().data();
    for (int64_t i = 0; i < n; ++i, w += dim, row += stride) {
      std::copy_n(w, dim, row);
      InitRowState(step, dim, row, row + dim);
    }
  }
};
REGISTER_KERNEL_BUILDER(Name("CtrRowInit").Device(tensorflow::DEVICE_CPU), RowInitOp);

class RowUpdateOp : public RowOptimizerOpKernel {
 public:
  explicit RowUpdateOp(tensorflow::OpKernelConstruction* context) : RowOptimizerOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("add", &add_));
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    const tensorflow::Tensor &gradient = context->input(1), &scale = context->input(2),
                             &last = context->input(3);
    OP_REQUIRES(
        context, gradient.dims() == 2 && gradient.dim_size(1) >= 1,
        absl::InvalidArgumentError(absl::StrCat(
            "gradient: found shape ", gradient.shape().DebugString(), "; wanted [n, dim]")));
    const int64_t n = gradient.dim_size(0), dim = gradient.dim_size(1),
                  stride = dim + RowStateFloats(rule_, dim);
    OP_REQUIRES_OK(context, CheckMatrix(context->input(0), "rows", n, stride));
    OP_REQUIRES(
        context, scale.dims() == 1 && (scale.dim_size(0) == 1 || scale.dim_size(0) == n),
        absl::InvalidArgumentError(absl::StrCat("scale: found shape ", scale.shape().DebugString(),
                                                "; wanted [1] or [", n, "]")));
    OP_REQUIRES_OK(context, CheckLength(last, "last_step", n));
    RowHyper hyper;
    OP_REQUIRES_OK(context, Hyper(context->input(4), &hyper));
    OP_REQUIRES_OK(context, CheckScalar(context->input(5), "step"));
    const int64_t now = context->input(5).scalar<int64_t>()();
    OP_REQUIRES(
        context, now >= 1 && now <= std::numeric_limits<int32_t>::max(),
        absl::InvalidArgumentError(absl::StrCat("step: found ", now, "; wanted 1 to 2^31 - 1")));
    tensorflow::Tensor* out;
    OP_REQUIRES_OK(context, context->forward_input_or_allocate_output(
                                {0}, 0, context->input(0).shape(), &out));
    const RowStep step(rule_, hyper, now);
    const float *from = context->input(0).flat<float>().data(), *g = gradient.flat<float>().data(),
                *scales = scale.flat<float>().data();
    const int32_t* last_step = last.flat<int32_t>().data();
    float* rows = out->flat<float>().data();
    const bool one_scale = scale.dim_size(0) == 1;
    ParallelForOf(context)(n, 20 + 4 * stride, [&](int64_t begin, int64_t end) {
      if (rows != from)
        std::copy(from + begin * stride, from + end * stride, rows + begin * stride);
      for (int64_t i = begin; i < end; ++i) {
        float* w = rows + i * stride;
        if (last_step[i] <= 0) InitRowState(step, dim, w, w + dim);
        if (add_) {
          AddToRow(step, dim, g + i * dim, w, w + dim);
          continue;
        }
        const int64_t missed = last_step[i] <= 0 ? 0 : std::max<int64_t>(0, now - 1 - last_step[i]);
        UpdateRow(step, dim, missed, scales[one_scale ? 0 : i], g + i * dim, w, w + dim);
      }
    });
  }

 private:
  bool add_;
};
REGISTER_KERNEL_BUILDER(Name("CtrRowUpdate").Device(tensorflow::DEVICE_CPU), RowUpdateOp);

}  // namespace
}  // namespace ctr
