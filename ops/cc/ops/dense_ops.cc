#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

namespace {

// Of a, the first `parts` inputs, and b, the next.
absl::Status Factors(InferenceContext* c, int* parts, DimensionHandle* rows, DimensionHandle* inner,
                     DimensionHandle* columns) {
  bool transpose_b;
  TF_RETURN_IF_ERROR(c->GetAttr("parts", parts));
  TF_RETURN_IF_ERROR(c->GetAttr("transpose_b", &transpose_b));
  *rows = c->UnknownDim();
  *inner = c->MakeDim(0);
  for (int i = 0; i < *parts; ++i) {
    ShapeHandle a;
    TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 2, &a));
    TF_RETURN_IF_ERROR(c->Merge(*rows, c->Dim(a, 0), rows));
    TF_RETURN_IF_ERROR(c->Add(*inner, c->Dim(a, 1), inner));
  }
  ShapeHandle b;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(*parts), 2, &b));
  TF_RETURN_IF_ERROR(c->Merge(*inner, c->Dim(b, transpose_b ? 1 : 0), inner));
  *columns = c->Dim(b, transpose_b ? 0 : 1);
  return absl::OkStatus();
}

}  // namespace

REGISTER_OP("CtrBfloat16Product")
    .Input("a: parts * float")
    .Input("b: float")
    .Input("bias: biases * float")
    .Output("product: float")
    .Attr("parts: int >= 1")
    .Attr("biases: int >= 0")
    .Attr("transpose_b: bool = false")
    .Attr("relu: bool = false")
    .SetShapeFn([](InferenceContext* c) {
      int parts;
      DimensionHandle rows, inner, columns;
      TF_RETURN_IF_ERROR(Factors(c, &parts, &rows, &inner, &columns));
      for (int i = parts + 1; i < c->num_inputs(); ++i) {
        ShapeHandle bias;
        TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 1, &bias));
        TF_RETURN_IF_ERROR(c->Merge(columns, c->Dim(bias, 0), &columns));
      }
      c->set_output(0, c->Matrix(rows, columns));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Product of two matrices whose elements are rounded to bfloat16 first; sums are in float32. Wants a
processor with avx512_bf16.

a: [m, k_i] each: the columns of the left factor, in parts that stand side by side.
b: [k, n] with k the sum of the k_i, or [n, k] where it is to be transposed.
bias: none, or one [n] that is added to each row.
relu: whether what is below 0 becomes 0 in the end.
product: [m, n]. A row of it depends on the same row of a alone, to the last bit.
)doc");

REGISTER_OP("CtrBfloat16ProductGradA")
    .Input("a: parts * float")
    .Input("b: float")
    .Input("product: float")
    .Input("grad: float")
    .Output("a_grads: parts * float")
    .Attr("parts: int >= 1")
    .Attr("transpose_b: bool = false")
    .Attr("relu: bool = false")
    .SetShapeFn([](InferenceContext* c) {
      int parts;
      DimensionHandle rows, inner, columns;
      TF_RETURN_IF_ERROR(Factors(c, &parts, &rows, &inner, &columns));
      for (int i = 0; i < parts; ++i) c->set_output(i, c->input(i));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Gradient of CtrBfloat16Product with respect to its left factor, multiplied as that multiplies.

a: as of the product; only the shapes are read.
b: as of the product.
product: what came out, where relu is true; else it is not read.
grad: the product's gradient.
a_grads: of each part.
)doc");

REGISTER_OP("CtrBfloat16ProductGradB")
    .Input("a: parts * float")
    .Input("b: float")
    .Input("product: float")
    .Input("grad: float")
    .Output("b_grad: float")
    .Output("bias_grad: float")
    .Attr("parts: int >= 1")
    .Attr("transpose_b: bool = false")
    .Attr("relu: bool = false")
    .Attr("bias: bool = false")
    .SetShapeFn([](InferenceContext* c) {
      int parts;
      bool bias;
      DimensionHandle rows, inner, columns;
      TF_RETURN_IF_ERROR(Factors(c, &parts, &rows, &inner, &columns));
      TF_RETURN_IF_ERROR(c->GetAttr("bias", &bias));
      c->set_output(0, c->input(parts));
      c->set_output(1, c->Vector(bias ? columns : c->MakeDim(0)));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Gradients of CtrBfloat16Product with respect to its right factor, multiplied as that multiplies, and
to the bias, a sum in float32.

a: as of the product.
b: as of the product; only the shape is read.
product: what came out, where relu is true; else it is not read.
grad: the product's gradient.
bias: whether the product had one, which wants a b that is not transposed.
b_grad: in the shape of b.
bias_grad: [n]; [0] where there was no bias.
)doc");
