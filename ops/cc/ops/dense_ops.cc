#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

namespace {

// Gets the sizes of the product a b: a is in the first `parts` inputs, b in the next one.
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
Multiplies two matrices whose elements are rounded to bfloat16 first; sums are in float32. It needs a
processor with avx512_bf16.

a: parts [m, k_i] of the left factor, whose columns are joined.
b: [k, n] with k the sum of the k_i; [n, k] with transpose_b.
bias: none, or one [n] that is added to each row.
relu: whether to apply a ReLU to the result.
product: [m, n]. A row of it depends only on the same row of a, to the last bit.
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
Gradient of CtrBfloat16Product with respect to its left factor, by a product of the same kind.

a: as in the product; only the shapes are read.
b: as in the product.
product: the output of the product; read only with relu.
grad: the gradient with respect to the product.
a_grads: the gradient with respect to each part of a.
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
Gradients of CtrBfloat16Product with respect to its right factor, by a product of the same kind, and
to its bias, by a sum in float32.

a: as in the product.
b: as in the product; only the shape is read.
product: the output of the product; read only with relu.
grad: the gradient with respect to the product.
bias: whether the product had a bias; not with transpose_b.
b_grad: of the shape of b.
bias_grad: [n]; [0] if there was no bias.
)doc");

REGISTER_OP("CtrMetricSums")
    .Input("labels: float")
    .Input("probabilities: float")
    .Input("weights: float")
    .Input("sums: resource")
    .Input("histogram: histograms * resource")
    .Attr("histograms: int >= 0")
    .Attr("kind: {'clicks', 'squared_error', 'losses'}")
    .Attr("buckets: int >= 2")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle samples;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &samples));
      for (int i : {1, 2}) TF_RETURN_IF_ERROR(c->Merge(samples, c->input(i), &samples));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Adds a batch to the sums from which metrics are computed.

What is added to a sum has its last 21 of 53 significant bits cleared, which changes it by at most
5e-10 of itself. About two million such numbers can be added without rounding. So metrics have the
same bits in whatever order batches and the sums of ranks are added.

labels: [B].
probabilities: [B]; for squared_error, the predictions; for losses, the losses.
weights: [B].
sums: a float64 variable. For clicks [8]: sum of weight, B, sums of weight * log loss, weight *
  probability and weight * label, the number of weights above 0, and sums of weight^2 and weight^2 *
  label. Otherwise [4]: sum of weight, B, sum of weight * squared error, or of weight * loss, and
  the number of weights above 0.
histogram: for clicks, a float64 variable [2, buckets], to which weights are added by class, 0 or 1,
  and by bucket of the prediction's logit, the lowest first. Otherwise none.
buckets: the number of buckets of predictions; even.
)doc");
