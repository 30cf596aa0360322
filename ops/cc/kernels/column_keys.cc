// Columns of a log to keys; ops/cc/data/keys.h says how.
#include "ops/cc/data/keys.h"
#include "ops/cc/kernels/row_store_kernels.h"

namespace ctr {
namespace {

// Whether offsets ascend within [0, bytes].
bool Ascending(const int32_t* offsets, int64_t n, int64_t bytes) {
  bool good = offsets[0] >= 0 && offsets[n] <= bytes;
  for (int64_t i = 0; i < n; ++i) good &= offsets[i] <= offsets[i + 1];
  return good;
}

template <typename T>
class ColumnKeysOp : public tensorflow::OpKernel {
 public:
  explicit ColumnKeysOp(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("slot_id", &slot_id_));
    OP_REQUIRES(context, slot_id_ < 2048,
                absl::InvalidArgumentError(
                    absl::StrCat("slot_id: found ", slot_id_, "; wanted 0 to 2047")));
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    const tensorflow::Tensor &values = context->input(0), &offsets = context->input(1);
    OP_REQUIRES_OK(context, CheckVector(values, "values"));
    OP_REQUIRES_OK(context, CheckVector(offsets, "offsets"));
    constexpr bool text = sizeof(T) == 1;
    const int64_t n = text ? offsets.dim_size(0) - 1 : values.dim_size(0);
    OP_REQUIRES(context, n >= 0 && (text || offsets.dim_size(0) == 0),
                absl::InvalidArgumentError(
                    absl::StrCat("offsets: found ", offsets.dim_size(0), "; wanted ",
                                 text ? "one more than there are texts" : "none with integers")));
    OP_REQUIRES(context, !text || Ascending(offsets.flat<int32_t>().data(), n, values.dim_size(0)),
                absl::InvalidArgumentError(absl::StrCat("offsets: wanted them ascending in [0, ",
                                                        values.dim_size(0), "]")));
    tensorflow::Tensor* keys;
    OP_REQUIRES_OK(context, context->allocate_output(0, {n}, &keys));
    int64_t* out = keys->flat<int64_t>().data();
    if constexpr (text) {
      KeysOfTexts(reinterpret_cast<const char*>(values.flat<T>().data()),
                  offsets.flat<int32_t>().data(), n, slot_id_, out);
    } else {
      KeysOfIntegers(values.flat<T>().data(), n, slot_id_, out);
    }
  }

 private:
  int64_t slot_id_;
};
REGISTER_KERNEL_BUILDER(
    Name("CtrColumnKeys").Device(tensorflow::DEVICE_CPU).TypeConstraint<uint8_t>("T"),
    ColumnKeysOp<uint8_t>);
REGISTER_KERNEL_BUILDER(
    Name("CtrColumnKeys").Device(tensorflow::DEVICE_CPU).TypeConstraint<int64_t>("T"),
    ColumnKeysOp<int64_t>);

}  // namespace
}  // namespace ctr
