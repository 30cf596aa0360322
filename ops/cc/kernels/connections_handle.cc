// CtrConnectionsHandle: takes over connected sockets, one for each other rank.
#include "ops/cc/kernels/connections_resource.h"
#include "tensorflow/core/framework/resource_op_kernel.h"

namespace ctr {
namespace {

class ConnectionsHandleOp : public tensorflow::ResourceOpKernel<ConnectionsResource> {
 public:
  explicit ConnectionsHandleOp(tensorflow::OpKernelConstruction* context)
      : ResourceOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("fds", &fds_));
    OP_REQUIRES_OK(context, context->GetAttr("rank", &rank_));
    OP_REQUIRES(
        context, rank_ >= 0 && rank_ < static_cast<int>(fds_.size()),
        absl::InvalidArgumentError(absl::StrCat(
            "rank: found ", rank_, "; wanted the place of one of the ", fds_.size(), " fds")));
  }

 private:
  absl::Status CreateResource(ConnectionsResource** resource) override {
    *resource = new ConnectionsResource(fds_, rank_);
    return absl::OkStatus();
  }

  std::vector<int> fds_;
  int rank_;
};
REGISTER_KERNEL_BUILDER(Name("CtrConnectionsHandle").Device(tensorflow::DEVICE_CPU),
                        ConnectionsHandleOp);

}  // namespace
}  // namespace ctr
