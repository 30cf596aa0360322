// The sums of a batch from which metrics are computed; ops/cc/ops/dense_ops.cc has their meaning.
// The kernel changes variables, under their locks; threads share the samples.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "ops/cc/kernels/feature_table_resource.h"
#include "tensorflow/core/framework/resource_var.h"

namespace ctr {
namespace {

constexpr int kClicks = 8, kOthers = 4;  // the number of sums for clicks, and for the others
constexpr int64_t kBlock = 512;  // samples whose sums are added first, on any number of threads

// Each octave of |logit| from 2^-20 to 2^5 is divided into equally many buckets, so that buckets
// are narrow near logit 0 and far from it. A logit beyond this range goes to the nearest bucket.
// The bits of positive float32 numbers, read as integers, have the order of the numbers.
constexpr int32_t kLeastBits = (127 - 20) << 23, kBits = 25 << 23;

int32_t BucketOf(double logit, int32_t buckets) {
  const float size = static_cast<float>(std::abs(logit));
  int32_t bits, half = buckets / 2;
  std::memcpy(&bits, &size, sizeof bits);
  const int32_t share = std::clamp(bits - kLeastBits, 0, kBits - 1);
  const int32_t place = static_cast<int32_t>(static_cast<int64_t>(share) * half / kBits);
  return logit < 0 ? half - 1 - place : half + place;
}

// Clears the last 21 of the 53 significant bits of a sum.
double Addable(double sum) {
  uint64_t bits;
  std::memcpy(&bits, &sum, sizeof bits);
  bits &= ~uint64_t{0} << 21;
  std::memcpy(&sum, &bits, sizeof bits);
  return sum;
}

// Adds to a variable, float64, which no other step changes meanwhile.
template <typename Add>
absl::Status AddTo(tensorflow::OpKernelContext* context, int input,
                   const tensorflow::TensorShape& shape, const Add& add) {
  tensorflow::core::RefCountPtr<tensorflow::Var> variable;
  TF_RETURN_IF_ERROR(
      tensorflow::LookupResource(context, tensorflow::HandleFromInput(context, input), &variable));
  tensorflow::mutex_lock lock(*variable->mu());
  tensorflow::Tensor* tensor = variable->tensor();
  if (tensor->dtype() != tensorflow::DT_DOUBLE || tensor->shape() != shape) {
    return absl::InvalidArgumentError(absl::StrCat("variable ", input, ": found ",
                                                   tensor->DebugString(0), "; wanted float64 ",
                                                   shape.DebugString()));
  }
  if (!tensor->RefCountIsOne()) {  // somebody reads it
    tensorflow::Tensor copy;
    TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_DOUBLE, shape, &copy));
    std::copy_n(tensor->flat<double>().data(), tensor->NumElements(), copy.flat<double>().data());
    *tensor = copy;
  }
  add(tensor->flat<double>().data());
  return absl::OkStatus();
}

class MetricSumsOp : public tensorflow::OpKernel {
 public:
  explicit MetricSumsOp(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("kind", &kind_));
    OP_REQUIRES_OK(context, context->GetAttr("buckets", &buckets_));
    OP_REQUIRES(
        context, buckets_ % 2 == 0,
        absl::InvalidArgumentError(absl::StrCat("buckets: found ", buckets_, "; wanted even")));
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    const tensorflow::Tensor& labels = context->input(0);
    OP_REQUIRES_OK(context, CheckVector(labels, "labels"));
    const int64_t n = labels.dim_size(0);
    for (int i : {1, 2}) {
      const tensorflow::Tensor& tensor = context->input(i);
      OP_REQUIRES(context, tensor.shape() == labels.shape(),
                  absl::InvalidArgumentError(absl::StrCat(
                      i == 1 ? "probabilities" : "weights", ": found shape ",
                      tensor.shape().DebugString(), "; wanted [", n, "], that of labels")));
    }
    const float* label = labels.flat<float>().data();
    const float* predicted = context->input(1).flat<float>().data();
    const float* weight = context->input(2).flat<float>().data();
    const bool clicks = kind_ == "clicks";
    OP_REQUIRES(context, context->num_inputs() == (clicks ? 5 : 4),
                absl::InvalidArgumentError(absl::StrCat(
                    "histogram: found ", context->num_inputs() - 4, "; wanted ", clicks ? 1 : 0)));
    const int count = clicks ? kClicks : kOthers;
    std::vector<int64_t> places(clicks ? n : 0);  // in the histogram
    const int64_t blocks = (n + kBlock - 1) / kBlock;
    std::vector<std::array<double, kClicks>> of_blocks(blocks);
    ParallelForOf(context)(blocks, kBlock * (clicks ? 20 : 2), [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        double total = 0, loss = 0, expected = 0, clicked = 0;
        double weighed = 0, squares = 0, clicked_squares = 0;
        const int64_t stop = std::min(n, (block + 1) * kBlock);
        for (int64_t i = block * kBlock; i < stop; ++i) {
          const double y = label[i], p = predicted[i], w = weight[i];
          total += w;
          weighed += w > 0;
          if (!clicks) {
            loss += w * (kind_ == "losses" ? p : (p - y) * (p - y));
            continue;
          }
          // float32 rounds numbers within 2^-25 of 1 to 1.
          const double inside = std::clamp(p, 1e-15, 1 - 0x1p-25);
          const double log_p = std::log(inside), log_not_p = std::log(1 - inside);
          places[i] = (y > 0.5 ? int64_t{buckets_} : 0) + BucketOf(log_p - log_not_p, buckets_);
          loss -= w * (y * log_p + (1 - y) * log_not_p);
          expected += w * p;
          clicked += w * y;
          squares += w * w;
          clicked_squares += w * w * y;
        }
        const double samples = static_cast<double>(stop - block * kBlock);
        if (clicks) {
          of_blocks[block] = {total,   samples, loss,    expected,
                              clicked, weighed, squares, clicked_squares};
        } else {
          of_blocks[block] = {total, samples, loss, weighed};
        }
      }
    });
    OP_REQUIRES_OK(context, AddTo(context, 3, {count}, [&](double* sums) {
                     for (int k = 0; k < count; ++k) {
                       double sum = 0;
                       for (const auto& of_block : of_blocks) sum += of_block[k];
                       sums[k] += Addable(sum);
                     }
                   }));
    if (clicks) {
      OP_REQUIRES_OK(context, AddTo(context, 4, {2, buckets_}, [&](double* histogram) {
                       for (int64_t i = 0; i < n; ++i) histogram[places[i]] += weight[i];
                     }));
    }
  }

 private:
  std::string kind_;
  int buckets_;
};
REGISTER_KERNEL_BUILDER(Name("CtrMetricSums").Device(tensorflow::DEVICE_CPU), MetricSumsOp);

}  // namespace
}  // namespace ctr
