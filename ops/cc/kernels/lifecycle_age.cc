#include "ops/cc/kernels/feature_table_resource.h"

namespace ctr {
namespace {

class LifecycleAgeOp : public FeatureTableOpKernel {
 public:
  using FeatureTableOpKernel::FeatureTableOpKernel;

 private:
  void ComputeOn(tensorflow::OpKernelContext* context, FeatureTableResource* resource) override {
    resource->table()->Age(ParallelForOf(context));
  }
};
REGISTER_KERNEL_BUILDER(Name("CtrLifecycleAge").Device(tensorflow::DEVICE_CPU), LifecycleAgeOp);

}  // namespace
}  // namespace ctr
