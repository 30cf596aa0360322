#include "ops/cc/kernels/feature_table_resource.h"

namespace ctr {
namespace {

class LifecycleDecayOp : public FeatureTableOpKernel {
 public:
  using FeatureTableOpKernel::FeatureTableOpKernel;

 private:
  void ComputeOn(tensorflow::OpKernelContext* context, FeatureTableResource* resource) override {
    resource->table()->Decay(ParallelForOf(context));
  }
};
REGISTER_KERNEL_BUILDER(Name("CtrLifecycleDecay").Device(tensorflow::DEVICE_CPU), LifecycleDecayOp);

}  // namespace
}  // namespace ctr
