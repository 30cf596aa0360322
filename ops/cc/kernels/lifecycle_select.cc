// Selects the features that a save writes, and commits them when it is complete.
#include <string>

#include "ops/cc/kernels/feature_table_resource.h"

namespace ctr {
namespace {

// The attribute's values are checked by its registration.
Kind KindOf(tensorflow::OpKernelConstruction* context) {
  std::string kind;
  context->SetStatus(context->GetAttr("kind", &kind));
  return kind == "delta" ? Kind::kDelta : kind == "base" ? Kind::kBase : Kind::kAll;
}

class LifecycleSelectOp : public FeatureTableOpKernel {
 public:
  explicit LifecycleSelectOp(tensorflow::OpKernelConstruction* context)
      : FeatureTableOpKernel(context), kind_(KindOf(context)) {}

 private:
  void ComputeOn(tensorflow::OpKernelContext* context, FeatureTableResource* resource) override {
    OP_REQUIRES_OK(context, OutputVector(context, 0,
                                         resource->table()->Select(kind_, ParallelForOf(context))));
  }

  const Kind kind_;
};
REGISTER_KERNEL_BUILDER(Name("CtrLifecycleSelect").Device(tensorflow::DEVICE_CPU),
                        LifecycleSelectOp);

class LifecycleCommitOp : public FeatureTableOpKernel {
 public:
  explicit LifecycleCommitOp(tensorflow::OpKernelConstruction* context)
      : FeatureTableOpKernel(context), kind_(KindOf(context)) {}

 private:
  void ComputeOn(tensorflow::OpKernelContext* context, FeatureTableResource* resource) override {
    const tensorflow::Tensor& keys = context->input(1);
    OP_REQUIRES_OK(context, CheckVector(keys, "keys"));
    OP_REQUIRES_OK(context, ToTensorFlow(resource->table()->Commit(
                                kind_, keys.flat<int64_t>().data(), keys.NumElements(),
                                ParallelForOf(context))));
  }

  const Kind kind_;
};
REGISTER_KERNEL_BUILDER(Name("CtrLifecycleCommit").Device(tensorflow::DEVICE_CPU),
                        LifecycleCommitOp);

}  // namespace
}  // namespace ctr
