// A tensor of a caller, and what is expected of one.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "convert.h"
#include "problem.h"
#include "value.h"

namespace specattn {

// What DLPack calls the types, in their order here.
struct DlpackType {
  uint8_t code, bits;
};
constexpr uint8_t kDlpackInt = 0, kDlpackUInt = 1, kDlpackFloat = 2, kDlpackBFloat = 4;
constexpr uint8_t kDlpackE4M3 = 10, kDlpackE5M2 = 12, kDlpackBool = 6;
constexpr DlpackType kDlpackTypes[kDtypes] = {
    {kDlpackFloat, 32}, {kDlpackBFloat, 16}, {kDlpackFloat, 16}, {kDlpackInt, 8},
    {kDlpackE4M3, 8},   {kDlpackE5M2, 8},    {kDlpackInt, 32},   {kDlpackInt, 64},
    {kDlpackFloat, 64}, {kDlpackUInt, 8}};
constexpr int kDlpackCpu = 1, kDlpackPinned = 3;

// Of a type that no kernel knows.
inline std::string dlpack_name(const DLDataType& type) {
  if (type.code == kDlpackBool) return "bool";
  const std::string kind = type.code == kDlpackInt     ? "int"
                           : type.code == kDlpackUInt  ? "uint"
                           : type.code == kDlpackFloat ? "float"
                                                       : "code " + std::to_string(type.code) + ".";
  return kind + std::to_string(type.bits);
}

struct View {
  static constexpr int kMostDims = 6;

  const char* name = "";
  void* data = nullptr;
  int dims = 0;
  int64_t shape[kMostDims] = {}, stride[kMostDims] = {};
  Dtype dtype = Dtype::kFloat32;

  // None gives a view without data.
  View(const char* name, const Value& value, bool strided = false) : name(name) {
    if (value.none()) return;
    if (value.kind != Value::Kind::kTensor) {
      throw WrongKind(std::string(name) + ": expected a tensor, got " + value.kind_name());
    }
    const DLTensor& from = *value.tensor;
    if (from.device.device_type != kDlpackCpu && from.device.device_type != kDlpackPinned) {
      fail("must lie on the CPU");
    }
    if (from.ndim > kMostDims) fail("must have at most 6 dimensions");
    dtype = type_of(from.dtype);
    data = static_cast<char*>(from.data) + from.byte_offset;
    dims = from.ndim;
    std::copy_n(from.shape, dims, shape);
    if (from.strides) {
      std::copy_n(from.strides, dims, stride);
    } else {
      int64_t step = 1;
      for (int i = dims - 1; i >= 0; step *= shape[i--]) stride[i] = step;
    }
    if (!strided && dims > 1 && shape[dims - 1] > 1 && stride[dims - 1] != 1) {
      fail("must have a contiguous last dimension");
    }
  }

  explicit operator bool() const { return present(); }
  bool present() const { return dims > 0; }

  // Shape and type must be these; -1 takes any size.
  const View& expect(Dtype type, std::initializer_list<int64_t> sizes) const {
    bool same = present() && dtype == type && dims == static_cast<int>(sizes.size());
    int i = 0;
    for (const int64_t size : sizes) {
      same = same && (size < 0 || size == shape[i]);
      ++i;
    }
    if (same) return *this;
    std::string expected, came;
    for (const int64_t size : sizes) {
      expected += expected.empty() ? "" : ", ";
      expected += size < 0 ? "any" : std::to_string(size);
    }
    for (int j = 0; j < dims; ++j) came += (j ? ", " : "") + std::to_string(shape[j]);
    fail("must be [" + expected + "] of " + kDtypeNames[static_cast<int>(type)] + ", got [" + came +
         "] of " + kDtypeNames[static_cast<int>(dtype)]);
  }

  // A vector of this type and size whose elements lie one after the other.
  const View& expect_dense(Dtype type, int64_t size) const {
    expect(type, {size});
    if (size > 1 && stride[0] != 1) fail("must be contiguous");
    return *this;
  }

  // One element of any floating type.
  float number(int64_t offset) const {
    if (dtype == Dtype::kFloat32) return as<float>()[offset];
    if (dtype == Dtype::kBFloat16) return to_float(as<bf16>()[offset]);
    if (dtype == Dtype::kFloat16) return to_float(as<fp16>()[offset]);
    if (dtype == Dtype::kFloat64) return static_cast<float>(as<double>()[offset]);
    fail("must be of a floating type");
  }

  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
  Rows rows() const { return {data, stride[0], stride[1], stride[2]}; }
  Rows ragged_rows() const { return {data, 0, stride[0], stride[1]}; }

  // 0 along a broadcast dimension.
  int64_t step(int i) const { return shape[i] == 1 ? 0 : stride[i]; }

  [[noreturn]] void fail(const std::string& what) const {
    throw std::invalid_argument(std::string(name) + " " + what);
  }

 private:
  Dtype type_of(const DLDataType& type) const {
    for (int i = 0; i < kDtypes; ++i) {
      const DlpackType& known = kDlpackTypes[i];
      if (type.code == known.code && type.bits == known.bits && type.lanes == 1) {
        return static_cast<Dtype>(i);
      }
    }
    fail("has the unknown type " + dlpack_name(type));
  }
};

}  // namespace specattn
