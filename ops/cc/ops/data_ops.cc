// Registrations of the ops that turn logs into prepared passes.
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("CtrEncodeFields")
    .Input("keys: int64")
    .Input("values: float")
    .Input("counts: int32")
    .Attr("slots: int >= 1")
    .Output("codes: uint16")
    .Output("fields_of: int64")
    .Output("field_counts: int32")
    .Output("field_keys: int64")
    .Output("field_values: float")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      for (int i = 0; i < 3; ++i) TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 1, &unused));
      int64_t slots;
      TF_RETURN_IF_ERROR(c->GetAttr("slots", &slots));
      c->set_output(0, c->Matrix(c->UnknownDim(), slots));
      c->set_output(1, c->Vector(slots));
      for (int i = 2; i < 5; ++i) c->set_output(i, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Numbers the distinct fields of a block of samples, slot by slot.

A field is what a sample has in a slot: none, one or several features, each with a value.

keys: [nnz], a sample's slots one after another; without counts [F * n], a slot after another.
values: [nnz], or [0]: all are 1.
counts: [n * F] features in each field; or [0]: each has one, of value 1, or none where its key is
  -1. n is at most 65536.
slots: F.
codes: [n, F]; equal fields of a slot have equal codes, from 0 in the order of first occurrence.
fields_of: [F] distinct fields of each slot.
field_counts: [sum of fields_of] features of each of these, slot by slot, by code.
field_keys: their keys, one field after another.
field_values: their values, or [0].
)doc");

REGISTER_OP("CtrGatherSamples")
    .Input("rows: int64")
    .Input("codes: uint16")
    .Input("bases: int64")
    .Input("keys: int64")
    .Input("splits: uint32")
    .Input("values: float")
    .Input("dense: float")
    .Attr("slots: int >= 1")
    .Attr("chunk: int >= 1")
    .Output("sample_keys: int64")
    .Output("sample_values: float")
    .Output("segments: int32")
    .Output("sample_dense: float")
    .Output("group: int64")
    .SetShapeFn([](InferenceContext* c) {
      const int dims[] = {1, 2, 3, 1, 1, 1, 2};
      ShapeHandle of[7];
      for (int i = 0; i < 7; ++i) TF_RETURN_IF_ERROR(c->WithRank(c->input(i), dims[i], &of[i]));
      for (int i : {0, 1, 2, 4}) c->set_output(i, c->Vector(c->UnknownDim()));
      c->set_output(3, c->Matrix(c->Dim(of[0], 0), c->Dim(of[6], 1)));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Samples of a prepared pass, by their places in it.

rows: [B] places.
codes: [n, W], with W = slots, or one more that is the group: of each sample and slot, which of the
  distinct fields of the slot, in the sample's chunk, it has.
bases: [chunks, W, 2]: where the slot's splits begin, and its keys.
keys: of the distinct fields, one after another.
splits: where a field's keys begin after the slot's, and where the next field's do; [0]: each field
  has one key.
values: of each key; [0]: all are 1.
dense: [n, Dn].
slots: F.
chunk: samples whose distinct fields are numbered together.
sample_keys: [nnz], a sample's slots one after another.
sample_values: [nnz]; [0] where every field has one feature of value 1.
segments: [nnz] sample * F + slot; [0] likewise.
sample_dense: [B, Dn].
group: [B], the key of the last field; [0] where there is no group.
)doc");
