// linear_few_rows: y = x W^T for a few rows of x, at the rate at which the weights are read.
#pragma once

#include "codes.h"
#include "types.h"

namespace specattn {

enum class Activation { kNone, kSilu, kGelu, kGeluTanh, kSigmoid };

// A row of `out` holds the rows of the parts behind one another; gated, act(part 0) * part 1. The
// residual is added last; it has the type of `out`, and may be `out`.
struct Linear {
  struct Weights {
    const void* data = nullptr;  // [rows, K], as torch.nn.Linear has them; codes: rows of bytes
    int64_t rows = 0, stride = 0;
    const void* bias = nullptr;  // [rows], or null
    // Of codes: [rows, groups], of `scale_type` and of bytes; zeros may be null. In tiles (codes.h)
    // all three lie close, and `stride` are the bytes of a row of words.
    const void *scale = nullptr, *zero = nullptr;
    int64_t scale_row = 0, zero_row = 0;
  };

  Dtype dtype = Dtype::kFloat32;  // of x, weights and biases, and of out unless `out_float`
  bool out_float = false;
  Codes codes = Codes::kNone;
  bool tiles = false;  // of codes
  Dtype scale_type = Dtype::kFloat32;
  int64_t group = 0;  // codes along K with one scale: 32, 64, or any number of blocks; or all of K
  int64_t M = 0, K = 0;
  const void* x = nullptr;
  int64_t x_row = 0;
  Weights parts[3];
  int num_parts = 1;
  bool gated = false;
  Activation activation = Activation::kNone;
  const void* residual = nullptr;
  int64_t residual_row = 0;
  void* out = nullptr;
  int64_t out_row = 0;

  int64_t columns() const {
    int64_t count = 0;
    for (int i = 0; i < (gated ? 1 : num_parts); ++i) count += parts[i].rows;
    return count;
  }
};

// The same product for many rows of x, summed in an order of its own; not by codes.
struct LinearManyRows : Linear {};
bool multiplies_many_rows(Dtype dtype);  // whether the code path in use does

// The numbers that codes mean, [rows, K], as Linear has codes.
struct Dequantise {
  Dtype dtype = Dtype::kFloat32;  // of out
  Codes codes = Codes::kNone;
  bool tiles = false;
  Dtype scale_type = Dtype::kFloat32;
  int64_t group = 0, K = 0;
  Linear::Weights weights;
  void* out = nullptr;
  int64_t out_row = 0;
};

// act(first) * second by element, all of [M, N]; `out` may be either.
struct Gate {
  Dtype dtype = Dtype::kFloat32;  // of out, and of what is read unless `in_float`
  bool in_float = false;
  Activation activation = Activation::kNone;
  int64_t M = 0, N = 0;
  const void *first = nullptr, *second = nullptr;
  int64_t first_row = 0, second_row = 0;
  void* out = nullptr;
  int64_t out_row = 0;
};

// Outputs [first, first + count) of a part, gated of both; they begin at `column` of a row of
// `out`. The same thread will probably read the weights of output `next` afterwards.
struct LinearPiece {
  int part = 0, count = 0;
  int64_t first = 0, column = 0, next = 0;
};

// Every element is summed in an order that follows from K alone: its bits depend neither on the
// other rows and how many they are, nor on the threads.
void run(const Linear&, int threads);
void run(const LinearManyRows&, int threads);
void run(const Gate&, int threads);
void run(const Dequantise&, int threads);

}  // namespace specattn
