// Element types and the sizes that every kernel shares.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace specattn {

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

// Of 8 bits, as caches hold them: sign, exponent and mantissa.
struct e4m3 {
  uint8_t bits;
};
struct e5m2 {
  uint8_t bits;
};
// What is known to hold no NaN.
struct e4m3_number {
  uint8_t bits;
};

// As it is loaded, an element is so many times too small: as fp16, which converts fast, e4m3 is.
template <class Elem>
inline constexpr float kUnit = 1.0f;
template <>
inline constexpr float kUnit<e4m3> = 256.0f;
template <>
inline constexpr float kUnit<e4m3_number> = 256.0f;

enum class Dtype {
  kFloat32,
  kBFloat16,
  kFloat16,
  kInt8,
  kFloat8E4M3,
  kFloat8E5M2,
  kInt32,
  kInt64,
  kFloat64,
  kUInt8
};
constexpr int kDtypes = 10;
constexpr const char* kDtypeNames[kDtypes] = {"float32",       "bfloat16",    "float16", "int8",
                                              "float8_e4m3fn", "float8_e5m2", "int32",   "int64",
                                              "float64",       "uint8"};

template <class Elem>
constexpr Dtype dtype_of() {
  if constexpr (std::is_same_v<Elem, bf16>) return Dtype::kBFloat16;
  if constexpr (std::is_same_v<Elem, fp16>) return Dtype::kFloat16;
  if constexpr (std::is_same_v<Elem, int8_t>) return Dtype::kInt8;
  if constexpr (std::is_same_v<Elem, e4m3>) return Dtype::kFloat8E4M3;
  if constexpr (std::is_same_v<Elem, e5m2>) return Dtype::kFloat8E5M2;
  return Dtype::kFloat32;
}

// Whether only caches hold elements of a type.
constexpr bool of_8_bits(Dtype type) { return type >= Dtype::kInt8 && type <= Dtype::kFloat8E5M2; }

// Of an element that kernels compute with, or that a cache holds.
constexpr int64_t size_of(Dtype type) {
  return of_8_bits(type) ? 1 : type == Dtype::kFloat32 ? 4 : 2;
}

template <class T>
struct Tag {
  using type = T;
};

// Calls `function` with the Tag of an 8-bit type.
template <class Function>
inline void with_8_bits(Dtype type, const Function& function) {
  if (type == Dtype::kInt8) return function(Tag<int8_t>{});
  if (type == Dtype::kFloat8E4M3) return function(Tag<e4m3>{});
  function(Tag<e5m2>{});
}

constexpr int kBlock = 64;       // keys in a block: one word of a packed tree mask
constexpr int kMostKeys = 256;   // in a step of several blocks
constexpr int kKeyStep = 8;      // arrays of addresses are padded so that a last step may read on
constexpr int kTile = 32;        // query rows in a tile: its share of a step stays in the L1 cache
constexpr int kManyRows = 64;    // of a head; more take steps of several blocks, and copies of K
constexpr int kRowPadding = 16;  // the widest vector: rows of a head are padded to it
constexpr int kColumnPadding = 32;  // of a head's dimensions: the depth of a matrix unit
constexpr int kMaxHeadDim = 576;    // multiples of 8 up to here: of keys, and
constexpr int kMaxValueDim = 512;   // of values
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
