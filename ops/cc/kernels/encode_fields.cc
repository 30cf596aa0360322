// Numbers the distinct fields of a block of samples, by ops/cc/data/keys.h.
#include <algorithm>

#include "ops/cc/data/keys.h"
#include "ops/cc/kernels/row_store_kernels.h"
#include "ops/cc/rows/scratch_pool.h"

namespace ctr {
namespace {

class EncodeFieldsOp : public tensorflow::OpKernel {
 public:
  explicit EncodeFieldsOp(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("slots", &slots_));
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    const tensorflow::Tensor &keys = context->input(0), &values = context->input(1),
                             &counts = context->input(2);
    OP_REQUIRES_OK(context, CheckVector(keys, "keys"));
    OP_REQUIRES_OK(context, CheckVector(values, "values"));
    OP_REQUIRES_OK(context, CheckVector(counts, "counts"));
    const int64_t nnz = keys.dim_size(0);
    const bool ragged = counts.dim_size(0) > 0;
    const int64_t fields = ragged ? counts.dim_size(0) : nnz;
    OP_REQUIRES(context, fields % slots_ == 0 && fields / slots_ <= FieldCoder::kMaxSamples,
                absl::InvalidArgumentError(
                    absl::StrCat("found ", fields, " fields; wanted a multiple of ", slots_,
                                 " of at most ", FieldCoder::kMaxSamples, " samples")));
    if (values.dim_size(0) > 0)
      OP_REQUIRES_OK(context, CheckLength(values, "values", ragged ? nnz : 0));
    FieldCoder::Block block;
    block.keys = keys.flat<int64_t>().data();
    block.n = fields / slots_;
    block.slots = slots_;
    if (values.dim_size(0) > 0) block.values = values.flat<float>().data();
    if (ragged) {
      block.counts = counts.flat<int32_t>().data();
      int64_t total = 0;
      bool negative = false;
      for (int64_t i = 0; i < fields; ++i) {
        total += block.counts[i];
        negative |= block.counts[i] < 0;
      }
      OP_REQUIRES(
          context, !negative && total == nnz,
          absl::InvalidArgumentError(absl::StrCat("counts: wanted them >= 0 and their sum ", nnz)));
    }
    tensorflow::Tensor* codes;
    OP_REQUIRES_OK(context, context->allocate_output(0, {block.n, slots_}, &codes));
    const ScratchPool<FieldCoder>::Lease coder(&pool_);
    coder->Encode(block, codes->flat<uint16_t>().data());
    OP_REQUIRES_OK(context, Give(context, 1, coder->fields_of));
    OP_REQUIRES_OK(context, Give(context, 2, coder->counts));
    OP_REQUIRES_OK(context, Give(context, 3, coder->keys));
    OP_REQUIRES_OK(context, Give(context, 4, coder->values));
  }

 private:
  template <typename T>
  static absl::Status Give(tensorflow::OpKernelContext* context, int output,
                           const std::vector<T>& values) {
    tensorflow::Tensor* tensor;
    TF_RETURN_IF_ERROR(
        context->allocate_output(output, {static_cast<int64_t>(values.size())}, &tensor));
    std::copy(values.begin(), values.end(), tensor->flat<T>().data());
    return absl::OkStatus();
  }

  int64_t slots_;
  ScratchPool<FieldCoder> pool_;
};
REGISTER_KERNEL_BUILDER(Name("CtrEncodeFields").Device(tensorflow::DEVICE_CPU), EncodeFieldsOp);

}  // namespace
}  // namespace ctr
