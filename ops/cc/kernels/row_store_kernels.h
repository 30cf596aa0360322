// What the kernels on rows share: checks of shapes, and finding the row store of a handle.
#pragma once

#include <limits>
#include <string>

#include "ops/cc/kernels/feature_table_resource.h"
#include "ops/cc/rows/row_store.h"

namespace ctr {

// Returns InvalidArgument, with the argument and its shape, unless it is a vector of that length.
inline absl::Status CheckLength(const tensorflow::Tensor& tensor, const char* name,
                                int64_t length) {
  if (tensor.dims() == 1 && tensor.dim_size(0) == length) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      name, ": found shape ", tensor.shape().DebugString(), "; wanted [", length, "]"));
}

inline absl::Status CheckScalar(const tensorflow::Tensor& tensor, const char* name) {
  if (tensor.dims() == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, ": found shape ", tensor.shape().DebugString(), "; wanted a scalar"));
}

// Checks that offsets [u + 1] ascend from 0 to `total`.
inline absl::Status CheckOffsets(const tensorflow::Tensor& offsets, const char* name, int64_t u,
                                 int64_t total) {
  if (u < 0) {  // of offsets without the first 0, from whose length a caller computed u
    return absl::InvalidArgumentError(absl::StrCat(name, ": found shape [0]; wanted [u + 1]"));
  }
  TF_RETURN_IF_ERROR(CheckLength(offsets, name, u + 1));
  const int32_t* at = offsets.flat<int32_t>().data();
  bool ascending = at[0] == 0;
  for (int64_t j = 0; j < u; ++j) ascending &= at[j + 1] >= at[j];
  if (ascending && at[u] == total) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(name, ": wanted them ascending from 0 to ", total,
                                                 "; found the last ", at[u],
                                                 ascending ? "" : ", not ascending from 0"));
}

// Checks that indices are in [0, bound).
inline absl::Status CheckIndices(const tensorflow::Tensor& indices, const char* name,
                                 int64_t bound) {
  const auto at = indices.flat<int32_t>();
  for (int64_t i = 0; i < at.size(); ++i) {
    if (at(i) < 0 || at(i) >= bound) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, "[", i, "]: found ", at(i), "; wanted an index in [0, ", bound, ")"));
    }
  }
  return absl::OkStatus();
}

// A row store, attached to its feature table.
struct RowStoreAttachment : TableAttachment {
  RowStoreAttachment(FeatureTable* table, RowLayout layout) : store(table, std::move(layout)) {}
  int64_t Bytes() const override { return store.Bytes(); }

  RowStore store;
};

// A kernel whose input 0 is a row store's handle.
class RowStoreOpKernel : public FeatureTableOpKernel {
 public:
  using FeatureTableOpKernel::FeatureTableOpKernel;

 protected:
  virtual void ComputeOnRows(tensorflow::OpKernelContext* context, FeatureTableResource* resource,
                             RowStore* store) = 0;

 private:
  void ComputeOn(tensorflow::OpKernelContext* context, FeatureTableResource* resource) final {
    auto* attachment = dynamic_cast<RowStoreAttachment*>(resource->attachment());
    OP_REQUIRES(context, attachment != nullptr,
                absl::InvalidArgumentError(
                    "table: found a feature table without rows; wanted a row store's handle"));
    ComputeOnRows(context, resource, &attachment->store);
  }
};

}  // namespace ctr
