// Returns how many features are admitted.
#include "ops/cc/kernels/feature_table_resource.h"

namespace ctr {
namespace {

class LifecycleAdmittedSizeOp : public FeatureTableOpKernel {
 public:
  using FeatureTableOpKernel::FeatureTableOpKernel;

 private:
  void ComputeOn(tensorflow::OpKernelContext* context, FeatureTableResource* resource) override {
    tensorflow::Tensor* output;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &output));
    output->scalar<int64_t>()() = resource->table()->AdmittedSize(ParallelForOf(context));
  }
};
REGISTER_KERNEL_BUILDER(Name("CtrLifecycleAdmittedSize").Device(tensorflow::DEVICE_CPU),
                        LifecycleAdmittedSizeOp);

}  // namespace
}  // namespace ctr
