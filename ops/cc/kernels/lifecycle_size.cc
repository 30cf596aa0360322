// Returns how many features there are, and how many bytes they take.
#include "ops/cc/kernels/feature_table_resource.h"

namespace ctr {
namespace {

absl::Status OutputScalar(tensorflow::OpKernelContext* context, int64_t value) {
  tensorflow::Tensor* output;
  TF_RETURN_IF_ERROR(context->allocate_output(0, {}, &output));
  output->scalar<int64_t>()() = value;
  return absl::OkStatus();
}

class LifecycleSizeOp : public FeatureTableOpKernel {
 public:
  using FeatureTableOpKernel::FeatureTableOpKernel;

 private:
  void ComputeOn(tensorflow::OpKernelContext* context, FeatureTableResource* resource) override {
    OP_REQUIRES_OK(context, OutputScalar(context, resource->table()->Size()));
  }
};
REGISTER_KERNEL_BUILDER(Name("CtrLifecycleSize").Device(tensorflow::DEVICE_CPU), LifecycleSizeOp);

class LifecycleBytesOp : public FeatureTableOpKernel {
 public:
  using FeatureTableOpKernel::FeatureTableOpKernel;

 private:
  void ComputeOn(tensorflow::OpKernelContext* context, FeatureTableResource* resource) override {
    OP_REQUIRES_OK(context, OutputScalar(context, resource->Bytes()));
  }
};
REGISTER_KERNEL_BUILDER(Name("CtrLifecycleBytes").Device(tensorflow::DEVICE_CPU), LifecycleBytesOp);

}  // namespace
}  // namespace ctr
