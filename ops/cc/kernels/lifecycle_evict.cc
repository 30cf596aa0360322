// Deletes features: those that the policy's tests choose, and those that rank below a cut, which is
// this table's own or was agreed on by all processes.
#include <vector>

#include "ops/cc/kernels/feature_table_resource.h"

namespace ctr {
namespace {

// Reads the digits of a rank from a tensor.
absl::Status ReadDigits(const tensorflow::Tensor& tensor, const char* name, int64_t most,
                        std::vector<uint16_t>* digits) {
  TF_RETURN_IF_ERROR(CheckVector(tensor, name));
  const auto values = tensor.flat<int32_t>();
  if (values.size() > most) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": found ", values.size(), " digits; wanted at most ", most));
  }
  for (int64_t i = 0; i < values.size(); ++i) {
    if (values(i) < 0 || values(i) >= kRankBins) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, "[", i, "]: found ", values(i), "; wanted a digit in [0, 65535]"));
    }
    digits->push_back(static_cast<uint16_t>(values(i)));
  }
  return absl::OkStatus();
}

class LifecycleEvictOp : public FeatureTableOpKernel {
 public:
  explicit LifecycleEvictOp(tensorflow::OpKernelConstruction* context)
      : FeatureTableOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("capacity", &capacity_));
  }

 private:
  void ComputeOn(tensorflow::OpKernelContext* context, FeatureTableResource* resource) override {
    const ParallelFor parallel_for = ParallelForOf(context);
    FeatureTable* table = resource->table();
    std::vector<int64_t> keys = table->Evict(parallel_for);
    if (capacity_) {
      const std::vector<int64_t> worst =
          table->EvictBelow(table->CapacityCut(parallel_for), parallel_for);
      keys.insert(keys.end(), worst.begin(), worst.end());
    }
    OP_REQUIRES_OK(context, OutputVector(context, 0, keys));
  }

  bool capacity_;
};
REGISTER_KERNEL_BUILDER(Name("CtrLifecycleEvict").Device(tensorflow::DEVICE_CPU), LifecycleEvictOp);

class LifecycleRankHistogramOp : public FeatureTableOpKernel {
 public:
  using FeatureTableOpKernel::FeatureTableOpKernel;

 private:
  void ComputeOn(tensorflow::OpKernelContext* context, FeatureTableResource* resource) override {
    std::vector<uint16_t> prefix;
    OP_REQUIRES_OK(context, ReadDigits(context->input(1), "prefix", kRankDigits - 1, &prefix));
    OP_REQUIRES_OK(
        context,
        OutputVector(context, 0, resource->table()->RankHistogram(prefix, ParallelForOf(context))));
  }
};
REGISTER_KERNEL_BUILDER(Name("CtrLifecycleRankHistogram").Device(tensorflow::DEVICE_CPU),
                        LifecycleRankHistogramOp);

class LifecycleEvictBelowOp : public FeatureTableOpKernel {
 public:
  using FeatureTableOpKernel::FeatureTableOpKernel;

 private:
  void ComputeOn(tensorflow::OpKernelContext* context, FeatureTableResource* resource) override {
    std::vector<uint16_t> cut;
    OP_REQUIRES_OK(context, ReadDigits(context->input(1), "cut", kRankDigits, &cut));
    OP_REQUIRES_OK(
        context,
        OutputVector(context, 0, resource->table()->EvictBelow(cut, ParallelForOf(context))));
  }
};
REGISTER_KERNEL_BUILDER(Name("CtrLifecycleEvictBelow").Device(tensorflow::DEVICE_CPU),
                        LifecycleEvictBelowOp);

}  // namespace
}  // namespace ctr
