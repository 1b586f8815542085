// Operators: what a caller hands over, taken in order and checked, becomes a call on fixed memory.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "graph.h"
#include "view.h"

namespace specattn {

// The arguments of an operator, taken in the order of its signature.
class Arguments {
 public:
  Arguments(const Value* values, int64_t count) : values_(values), count_(count) {}

  View tensor(const char* name) { return {name, next()}; }
  // One whose last dimension may be strided, too.
  View strided(const char* name) { return {name, next(), true}; }
  template <class T>
  T value() {
    const Value& taken = next();
    return taken.as<T>(at_);
  }
  void end() const {
    if (at_ != count_) throw WrongKind("too many arguments");
  }

 private:
  const Value& next() {
    if (at_ == count_) throw WrongKind("too few arguments");
    return values_[at_++];
  }

  const Value* values_;
  int64_t count_, at_ = 0;
};

using Made = std::unique_ptr<const Call>;

// Under its name, with the arguments of its torch operator, outputs last.
struct Operator {
  const char* name;
  Made (*make)(Arguments&);
  const char* doc = nullptr;
};

// The type of queries, keys or values.
inline Dtype floating(const View& q, int dims = 4) {
  if (q.dims != dims) q.fail("must have " + std::to_string(dims) + " dimensions");
  if (q.dtype > Dtype::kFloat16) q.fail("must be float32, bfloat16 or float16");
  const int64_t head_dim = q.shape[dims - 1];
  if (head_dim % 8 || head_dim > kMaxHeadDim || head_dim == 0) {
    q.fail("must have a head_dim that is a multiple of 8 up to " + std::to_string(kMaxHeadDim));
  }
  return q.dtype;
}

// The scales of a cache of 8 bits: [Hk], or in the places of its tokens; none are 1.
inline Rows scale_rows(const View& scale, const View& cache) {
  static const float one = 1.0f;
  if (!scale) return {&one, 0, 0, 0};
  if (!of_8_bits(cache.dtype)) scale.fail("must be None for a cache of more than 8 bits");
  const int64_t heads = cache.shape[2];
  if (scale.dims == 1) {
    scale.expect(Dtype::kFloat32, {heads});
    return {scale.data, 0, 0, scale.stride[0]};
  }
  scale.expect(Dtype::kFloat32, {cache.shape[0], cache.shape[1], heads});
  return scale.rows();
}

// The operators of each file, and all of them.
std::vector<Operator> attention_operators();
std::vector<Operator> layer_operators();
std::vector<Operator> candidate_operators();
std::vector<Operator> recurrent_operators();
std::vector<Operator> exchange_operators();
const std::vector<Operator>& operators();
const Operator& operator_named(const std::string& name);  // which there must be

}  // namespace specattn
