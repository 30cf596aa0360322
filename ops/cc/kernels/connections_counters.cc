// CtrConnectionsCounters: counts what connections have sent and received so far.
#include "ops/cc/kernels/connections_resource.h"

namespace ctr {
namespace {

class ConnectionsCountersOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* context) override {
    std::shared_ptr<ConnectionsResource> resource;
    OP_REQUIRES_OK(context, LookupConnections(context, &resource));
    tensorflow::Tensor* output;
    OP_REQUIRES_OK(context, context->allocate_output(0, {4}, &output));
    const Connections::Counters counters = resource->connections()->counters();
    auto values = output->flat<int64_t>();
    values(0) = counters.connections;
    values(1) = counters.bytes_sent;
    values(2) = counters.bytes_received;
    values(3) = counters.system_calls;
  }
};
REGISTER_KERNEL_BUILDER(Name("CtrConnectionsCounters").Device(tensorflow::DEVICE_CPU),
                        ConnectionsCountersOp);

}  // namespace
}  // namespace ctr
