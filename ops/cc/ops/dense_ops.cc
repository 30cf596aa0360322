#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("CtrBfloat16Product")
    .Input("a: float")
    .Input("b: float")
    .Output("product: float")
    .Attr("transpose_a: bool = false")
    .Attr("transpose_b: bool = false")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle a, b;
      bool transpose_a, transpose_b;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &a));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 2, &b));
      TF_RETURN_IF_ERROR(c->GetAttr("transpose_a", &transpose_a));
      TF_RETURN_IF_ERROR(c->GetAttr("transpose_b", &transpose_b));
      DimensionHandle inner;
      TF_RETURN_IF_ERROR(
          c->Merge(c->Dim(a, transpose_a ? 0 : 1), c->Dim(b, transpose_b ? 1 : 0), &inner));
      c->set_output(0, c->Matrix(c->Dim(a, transpose_a ? 1 : 0), c->Dim(b, transpose_b ? 0 : 1)));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Product of two matrices whose elements are rounded to bfloat16 first; sums are in float32. Wants a
processor with avx512_bf16.

a: [m, k], or [k, m] where it is to be transposed.
b: [k, n], or [n, k] where it is to be transposed.
product: [m, n]. A row of it depends on the same row of a alone, to the last bit.
)doc");
