// The tests of bfloat16_product_test.cc on every processor, by emulated instructions.
#define ctr emulated  // the library has the same names
#define CTR_EMULATED_BFLOAT16
#include "ops/cc/dense/bfloat16_product.cc"
#include "tests/cc/bfloat16_product_test.cc"
