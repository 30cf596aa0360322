#include "ops/cc/kernels/feature_table_resource.h"

namespace ctr {
namespace {

class LifecycleAdmittedOp : public FeatureTableOpKernel {
 public:
  using FeatureTableOpKernel::FeatureTableOpKernel;

 private:
  void ComputeOn(tensorflow::OpKernelContext* context, FeatureTableResource* resource) override {
    const tensorflow::Tensor& keys = context->input(1);
    OP_REQUIRES_OK(context, CheckVector(keys, "keys"));
    tensorflow::Tensor* admitted;
    OP_REQUIRES_OK(context, context->allocate_output(0, keys.shape(), &admitted));
    OP_REQUIRES_OK(context, ToTensorFlow(resource->table()->Admitted(
                                keys.flat<int64_t>().data(), keys.NumElements(),
                                ParallelForOf(context), admitted->flat<bool>().data())));
  }
};
REGISTER_KERNEL_BUILDER(Name("CtrLifecycleAdmitted").Device(tensorflow::DEVICE_CPU),
                        LifecycleAdmittedOp);

}  // namespace
}  // namespace ctr
