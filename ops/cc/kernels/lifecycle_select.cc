// Selects the features that a save writes, and commits them when it is complete.
#include <string>
#include <vector>

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
    std::vector<int64_t> selected;
    if (context->num_inputs() == 1) {
      selected = resource->table()->Select(kind_, ParallelForOf(context));
    } else {
      const tensorflow::Tensor& among = context->input(1);
      OP_REQUIRES_OK(context, CheckVector(among, "among"));
      OP_REQUIRES_OK(context, ToTensorFlow(resource->table()->SelectAmong(
                                  kind_, among.flat<int64_t>().data(), among.NumElements(),
                                  ParallelForOf(context), &selected)));
    }
    OP_REQUIRES_OK(context, OutputVector(context, 0, selected));
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
