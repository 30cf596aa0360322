// Counts the features that have changed since the last checkpoint, lists those that have changed
// since the last delta, and begins anew.
#include <cstdint>
#include <vector>

#include "ops/cc/kernels/feature_table_resource.h"

namespace ctr {
namespace {

class LifecycleCountChangesOp : public FeatureTableOpKernel {
 public:
  using FeatureTableOpKernel::FeatureTableOpKernel;

 private:
  void ComputeOn(tensorflow::OpKernelContext* context, FeatureTableResource* resource) override {
    tensorflow::Tensor* count;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &count));
    count->scalar<int64_t>()() = resource->table()->CountChanges();
  }
};
REGISTER_KERNEL_BUILDER(Name("CtrLifecycleCountChanges").Device(tensorflow::DEVICE_CPU),
                        LifecycleCountChangesOp);

class LifecycleKeepChangesOp : public FeatureTableOpKernel {
 public:
  using FeatureTableOpKernel::FeatureTableOpKernel;

 private:
  void ComputeOn(tensorflow::OpKernelContext*, FeatureTableResource* resource) override {
    resource->table()->KeepChanges();
  }
};
REGISTER_KERNEL_BUILDER(Name("CtrLifecycleKeepChanges").Device(tensorflow::DEVICE_CPU),
                        LifecycleKeepChangesOp);

class LifecycleTakeChangesOp : public FeatureTableOpKernel {
 public:
  using FeatureTableOpKernel::FeatureTableOpKernel;

 private:
  void ComputeOn(tensorflow::OpKernelContext* context, FeatureTableResource* resource) override {
    std::vector<int64_t> keys;
    tensorflow::Tensor* known;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &known));
    known->scalar<bool>()() = resource->table()->TakeChanges(&keys);
    OP_REQUIRES_OK(context, OutputVector(context, 1, keys));
  }
};
REGISTER_KERNEL_BUILDER(Name("CtrLifecycleTakeChanges").Device(tensorflow::DEVICE_CPU),
                        LifecycleTakeChangesOp);

}  // namespace
}  // namespace ctr
