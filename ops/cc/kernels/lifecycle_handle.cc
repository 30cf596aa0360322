// Creates or finds a feature table by name.
#include <memory>
#include <string>

#include "ops/cc/kernels/feature_table_resource.h"
#include "tensorflow/core/framework/resource_op_kernel.h"

namespace ctr {
namespace {

class LifecycleHandleOp : public tensorflow::ResourceOpKernel<FeatureTableResource> {
 public:
  explicit LifecycleHandleOp(tensorflow::OpKernelConstruction* context)
      : ResourceOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("policy", &text_));
    OP_REQUIRES_OK(context, ToTensorFlow(Policy::Parse(text_, &policy_)));
  }

 private:
  absl::Status CreateResource(FeatureTableResource** resource) override {
    *resource = new FeatureTableResource(policy_, /*payload_bytes=*/0, text_);
    return absl::OkStatus();
  }

  absl::Status VerifyResource(FeatureTableResource* resource) override {
    if (resource->description() == text_) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("policy: found '", text_, "'; wanted '",
                                                   resource->description(),
                                                   "', that of the table of the same name"));
  }

  std::string text_;
  Policy policy_;
};
REGISTER_KERNEL_BUILDER(Name("CtrLifecycleHandle").Device(tensorflow::DEVICE_CPU),
                        LifecycleHandleOp);

}  // namespace
}  // namespace ctr
