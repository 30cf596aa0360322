// Exports the rows of a store and imports them, for checkpoints; CtrLifecycleExport and
// CtrLifecycleImport do so with the features.
#include <vector>

#include "ops/cc/kernels/row_store_kernels.h"

namespace ctr {
namespace {

// Counts the admitted keys of each table with factors; InvalidArgument if a slot has no table.
absl::Status CountAdmitted(const RowLayout& layout, const tensorflow::Tensor& keys,
                           const tensorflow::Tensor& admitted, std::vector<int64_t>* counts) {
  TF_RETURN_IF_ERROR(CheckVector(keys, "keys"));
  TF_RETURN_IF_ERROR(CheckLength(admitted, "admitted", keys.dim_size(0)));
  counts->assign(layout.tables.size(), 0);
  const auto key = keys.flat<int64_t>();
  const auto flag = admitted.flat<bool>();
  for (int64_t i = 0; i < key.size(); ++i) {
    const int table = layout.TableOf(key(i));
    if (table < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("keys[", i, "]: found ", key(i), "; wanted a key whose slot has a table"));
    }
    if (flag(i) && layout.tables[table].width > 0) ++(*counts)[table];
  }
  return absl::OkStatus();
}

// Returns the type of exported factors.
tensorflow::DataType DataTypeOf(const RowTable& table) {
  return table.bfloat16 ? tensorflow::DT_UINT16 : tensorflow::DT_FLOAT;
}

// Returns InvalidArgument unless `dtypes` are those of the layout's tables.
absl::Status CheckTypes(const RowLayout& layout, const tensorflow::DataTypeVector& dtypes) {
  tensorflow::DataTypeVector wanted;
  for (const RowTable& table : layout.tables) wanted.push_back(DataTypeOf(table));
  if (dtypes == wanted) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("dtypes: found ", tensorflow::DataTypeVectorString(dtypes), "; wanted ",
                   tensorflow::DataTypeVectorString(wanted), ", as the tables are"));
}

class RowStoreExportOp : public RowStoreOpKernel {
 public:
  explicit RowStoreExportOp(tensorflow::OpKernelConstruction* context) : RowStoreOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("dtypes", &dtypes_));
  }

 private:
  void ComputeOnRows(tensorflow::OpKernelContext* context, FeatureTableResource*,
                     RowStore* store) override {
    const tensorflow::Tensor &keys = context->input(1), &admitted = context->input(2);
    const RowLayout& layout = store->layout();
    OP_REQUIRES_OK(context, CheckTypes(layout, dtypes_));
    std::vector<int64_t> counts;
    OP_REQUIRES_OK(context, CountAdmitted(layout, keys, admitted, &counts));
    const int64_t n = keys.dim_size(0);
    tensorflow::Tensor *linear, *last_step;
    OP_REQUIRES_OK(context, context->allocate_output(0, {n, layout.linear_floats()}, &linear));
    OP_REQUIRES_OK(context, context->allocate_output(1, {n}, &last_step));
    std::vector<char*> factors;
    for (size_t t = 0; t < counts.size(); ++t) {
      tensorflow::Tensor* rows;
      OP_REQUIRES_OK(context, context->allocate_output(
                                  2 + t, {counts[t], layout.tables[t].row_size()}, &rows));
      factors.push_back(static_cast<char*>(rows->data()));
    }
    OP_REQUIRES_OK(context,
                   ToTensorFlow(store->ExportRows(
                       keys.flat<int64_t>().data(), admitted.flat<bool>().data(), n,
                       linear->flat<float>().data(), last_step->flat<int32_t>().data(), factors)));
  }

  tensorflow::DataTypeVector dtypes_;
};
REGISTER_KERNEL_BUILDER(Name("CtrRowStoreExport").Device(tensorflow::DEVICE_CPU), RowStoreExportOp);

class RowStoreImportOp : public RowStoreOpKernel {
 public:
  explicit RowStoreImportOp(tensorflow::OpKernelConstruction* context) : RowStoreOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("dtypes", &dtypes_));
  }

 private:
  void ComputeOnRows(tensorflow::OpKernelContext* context, FeatureTableResource*,
                     RowStore* store) override {
    const tensorflow::Tensor &keys = context->input(1), &admitted = context->input(2),
                             &linear = context->input(3);
    const RowLayout& layout = store->layout();
    OP_REQUIRES_OK(context, CheckTypes(layout, dtypes_));
    std::vector<int64_t> counts;
    OP_REQUIRES_OK(context, CountAdmitted(layout, keys, admitted, &counts));
    const int64_t n = keys.dim_size(0);
    OP_REQUIRES(context, linear.shape() == tensorflow::TensorShape({n, layout.linear_floats()}),
                absl::InvalidArgumentError(absl::StrCat("linear: found shape ",
                                                        linear.shape().DebugString(), "; wanted [",
                                                        n, ", ", layout.linear_floats(), "]")));
    OP_REQUIRES_OK(context, CheckLength(context->input(4), "last_step", n));
    std::vector<const char*> factors;
    for (size_t t = 0; t < counts.size(); ++t) {
      const tensorflow::Tensor& rows = context->input(5 + t);
      OP_REQUIRES(context,
                  rows.shape() == tensorflow::TensorShape({counts[t], layout.tables[t].row_size()}),
                  absl::InvalidArgumentError(absl::StrCat(
                      "factors[", t, "]: found shape ", rows.shape().DebugString(), "; wanted [",
                      counts[t], ", ", layout.tables[t].row_size(), "]")));
      factors.push_back(static_cast<const char*>(rows.data()));
    }
    OP_REQUIRES_OK(context, ToTensorFlow(store->ImportRows(
                                keys.flat<int64_t>().data(), admitted.flat<bool>().data(), n,
                                linear.flat<float>().data(),
                                context->input(4).flat<int32_t>().data(), factors)));
  }

  tensorflow::DataTypeVector dtypes_;
};
REGISTER_KERNEL_BUILDER(Name("CtrRowStoreImport").Device(tensorflow::DEVICE_CPU), RowStoreImportOp);

}  // namespace
}  // namespace ctr
