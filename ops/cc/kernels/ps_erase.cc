// Deletes features by key: a worker's copies of rows that the servers have evicted.
#include "ops/cc/kernels/row_store_kernels.h"

namespace ctr {
namespace {

class RowStoreEraseOp : public RowStoreOpKernel {
 public:
  using RowStoreOpKernel::RowStoreOpKernel;

 private:
  void ComputeOnRows(tensorflow::OpKernelContext* context, FeatureTableResource* resource,
                     RowStore*) override {
    const tensorflow::Tensor& keys = context->input(1);
    OP_REQUIRES_OK(context, CheckVector(keys, "keys"));
    FeatureTable* const table = resource->table();
    const auto key = keys.flat<int64_t>();
    for (int64_t i = 0; i < key.size(); ++i) {
      const uint64_t mixed = Mix64(key(i));
      FeatureTable::Shard& shard = table->shard(ShardOf(mixed));
      std::lock_guard<std::mutex> lock(shard.mutex);
      const int64_t local = shard.Find(key(i), mixed);
      if (local < 0) continue;
      table->on_erase(ShardOf(mixed), shard.Payload(local));
      shard.Erase(local);
    }
  }
};
REGISTER_KERNEL_BUILDER(Name("CtrRowStoreErase").Device(tensorflow::DEVICE_CPU), RowStoreEraseOp);

}  // namespace
}  // namespace ctr
