// Returns how many features are admitted.
#include <atomic>

#include "ops/cc/kernels/feature_table_resource.h"

namespace ctr {
namespace {

class LifecycleAdmittedSizeOp : public FeatureTableOpKernel {
 public:
  using FeatureTableOpKernel::FeatureTableOpKernel;

 private:
  void ComputeOn(tensorflow::OpKernelContext* context, FeatureTableResource* resource) override {
    FeatureTable* table = resource->table();
    std::atomic<int64_t> total{0};
    ParallelForOf(context)(kShards, 100000, [&](int64_t begin, int64_t end) {
      int64_t admitted = 0;
      for (int64_t s = begin; s < end; ++s) {
        FeatureTable::Shard& shard = table->shard(s);
        std::lock_guard<std::mutex> lock(shard.mutex);
        for (int64_t local = 0; local < shard.end(); ++local) {
          const Feature* feature = shard.At(local);
          admitted += feature->key >= 0 && feature->admitted;
        }
      }
      total += admitted;
    });
    tensorflow::Tensor* output;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &output));
    output->scalar<int64_t>()() = total;
  }
};
REGISTER_KERNEL_BUILDER(Name("CtrLifecycleAdmittedSize").Device(tensorflow::DEVICE_CPU),
                        LifecycleAdmittedSizeOp);

}  // namespace
}  // namespace ctr
