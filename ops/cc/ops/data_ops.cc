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

keys: [nnz], slot by slot, and sample by sample within a slot.
values: [nnz], or [0] if all are 1.
counts: [F * n], how many features each field has; or [0] if each has one, of value 1, or none where
  its key is -1. n is at most 65536.
slots: F.
codes: [n, F]; equal fields of a slot have equal codes, from 0 in the order of first occurrence.
fields_of: [F], how many distinct fields each slot has.
field_counts: [sum of fields_of], how many features each distinct field has, ordered by slot, then
  by code.
field_keys: the keys of these features, one field after another.
field_values: the values of these features, or [0] if all are 1.
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
Reads samples of a prepared pass. docs/data.md describes the arrays of a pass; a field is what a
slot holds in one sample.

rows: [B], the places of the samples in the pass.
codes: [n, W], where W is the number of slots, or one more for the group: for each sample and slot,
  the number of its field among the distinct fields of the slot in the sample's chunk.
bases: [chunks, W, 2]: where a chunk's fields of a slot begin in splits, and their features in keys.
keys: the keys of the distinct fields, one field after another.
splits: where each distinct field's keys begin, counted from the first of its chunk and slot; after
  the last field of these, the end. [0] if each field has one key.
values: the value of each key; [0] if all are 1.
dense: [n, Dn].
slots: F.
chunk: the number of samples in a chunk.
sample_keys: [nnz], sample by sample, and slot by slot within a sample.
sample_values: [nnz]; [0] if every field has one feature of value 1.
segments: [nnz] sample * F + slot; [0] if every field has one feature of value 1.
sample_dense: [B, Dn].
group: [B], the key of the last field; [0] if there is no group.
)doc");
