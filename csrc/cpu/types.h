// Element types and the sizes that every kernel shares.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

namespace specattn {

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

enum class Dtype { kFloat32, kBFloat16, kFloat16, kInt32, kInt64, kFloat64 };
constexpr int kDtypes = 6;
constexpr const char* kDtypeNames[kDtypes] = {"float32", "bfloat16", "float16",
                                              "int32",   "int64",    "float64"};

// Of an element that kernels compute with.
constexpr int64_t size_of(Dtype type) { return type == Dtype::kFloat32 ? 4 : 2; }

constexpr int kBlock = 64;       // keys in a block: one word of a packed tree mask
constexpr int kMostKeys = 256;   // in a step of several blocks
constexpr int kKeyStep = 8;      // arrays of addresses are padded so that a last step may read on
constexpr int kTile = 32;        // query rows in a tile: its share of a step stays in the L1 cache
constexpr int kManyRows = 64;    // of a head; more take steps of several blocks, and copies of K
constexpr int kRowPadding = 16;  // the widest vector: rows of a head are padded to it
constexpr int kColumnPadding = 32;  // of a head's dimensions: the depth of a matrix unit
constexpr int kMaxHeadDim = 256;    // multiples of 8 up to here
constexpr float kInf = std::numeric_limits<float>::infinity();

struct StridedRows {
  const char* first;
  int64_t stride;  // bytes
};

// Whether a processor multiplies elements of a type in tiles of a matrix unit.
template <class Isa, class Elem>
inline constexpr bool kTiles = false;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace specattn
