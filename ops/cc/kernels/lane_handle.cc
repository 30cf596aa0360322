// Creates lanes.
#include "ops/cc/kernels/lane_resource.h"
#include "tensorflow/core/framework/resource_op_kernel.h"

namespace ctr {
namespace {

class LaneHandleOp : public tensorflow::ResourceOpKernel<LaneResource> {
 public:
  explicit LaneHandleOp(tensorflow::OpKernelConstruction* context) : ResourceOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("fds", &fds_));
    OP_REQUIRES_OK(context, context->GetAttr("rank", &rank_));
    OP_REQUIRES(context, rank_ >= 0 && rank_ < static_cast<int>(fds_.size()),
                absl::InvalidArgumentError(
                    absl::StrCat("rank: found ", rank_, "; wanted the place of one of the ", fds_.size(), " fds")));
  }

 private:
  tensorflow::Status CreateResource(LaneResource** resource) override {
    *resource = new LaneResource(fds_, rank_);
    return absl::OkStatus();
  }

  std::vector<int> fds_;
  int rank_;
};
REGISTER_KERNEL_BUILDER(Name("CtrLaneHandle").Device(tensorflow::DEVICE_CPU), LaneHandleOp);

}  // namespace
}  // namespace ctr
