// Keys and values of 8 bits as elements that the products of many rows take.
#pragma once

#include <type_traits>

#include "convert.h"
#include "keys.h"
#include "packed.h"

namespace specattn {

// A row times its scale, and its kUnit, padded with zeros to `stride`.
template <class Isa, class Stored, class To>
inline void dequantise(const char* row, float scale, To* to, int D, int stride) {
  const Stored* from = reinterpret_cast<const Stored*>(row);
  const auto factor = Isa::set1(scale);
  int d = 0;
  for (; d + Isa::W <= D; d += Isa::W) {
    Isa::store_as(to + d, Isa::mul(Isa::load_units(from + d), factor));
  }
  for (; d < stride; ++d)
    to[d] = from_float<To>(d < D ? to_float(from[d]) / kUnit<Stored> * scale : 0.0f);
}

// A step's scales in whole vectors, over their greatest magnitude, which is returned: weights of
// values are rounded, and where all scales are alike, only those are.
template <class Isa, int kBlocks>
float relative_scales(const Step<kBlocks>& step, const char* const (&rows)[Step<kBlocks>::kKeys],
                      int64_t head, float* to) {
  step.scales(rows, head, false, to);
  std::fill(to + step.keys, to + round_up(step.keys, Isa::W), 0.0f);
  auto most = Isa::zero();
  for (int n = 0; n < step.keys; n += Isa::W) {
    const auto x = Isa::load(to + n);
    most = Isa::max(most, Isa::max(x, Isa::sub(Isa::zero(), x)));
  }
  const float unit = Isa::greatest(most);
  if (!(unit > 1e-30f && unit < kInf)) return 1.0f;
  const auto inverse = Isa::set1(1.0f / unit);
  for (int n = 0; n < step.keys; n += Isa::W) {
    Isa::store(to + n, Isa::mul(Isa::load(to + n), inverse));
  }
  return unit;
}

// Copies the rows of a step and head, as floats where these are multiplied, else as they are meant
// in the type of the queries.
template <class Isa, class Elem, int kBlocks>
class Dequantised {
  static constexpr bool kWide = Isa::template Dot<Elem>::kPair == 1 && !kTiles<Isa, Elem>;
  using To = std::conditional_t<kWide, float, Elem>;

 public:
  explicit Dequantised(const PackedRows<Isa, Elem>& rows) : rows_(rows) {}

  // The step itself where it is no cache of 8 bits, or products take these.
  template <class Products>
  const Step<kBlocks>& of(const Step<kBlocks>& step, int64_t head) {
    if (Products::kTakesStored || !of_8_bits(step.type)) return step;
    step_ = step;
    float* const memory = rows_.scratch.stored;
    copy(step.k, step.k_scale, head * step.k_scale_head, rows_.D, rows_.stride, memory, step_.k,
         step_.k_apart);
    copy(step.v, step.v_scale, head * step.v_scale_head, rows_.Dv, rows_.v_stride,
         memory + Scratch::kKeyFloats, step_.v, step_.v_apart);
    step_.v_in_k = false;
    for (int n = step.keys; n < Step<kBlocks>::kKeys + kKeyStep; ++n) {
      step_.k[n] = step_.k[step.keys - 1];
    }
    step_.type = std::is_same_v<To, float> ? Dtype::kFloat32 : rows_.a.dtype;
    return step_;
  }

 private:
  template <int kKeys>
  void copy(const char* const* rows, const char* const (&scale_rows)[kKeys], int64_t head, int D,
            int stride, float* memory, const char** to, int64_t& apart) {
    float scales[kKeys];
    step_.scales(scale_rows, head, true, scales);
    To* const first = reinterpret_cast<To*>(memory);
    with_8_bits(rows_.a.cache.type, [&](auto tag) {
      for (int n = 0; n < step_.keys; ++n) {
        To* const row = first + n * stride;
        dequantise<Isa, typename decltype(tag)::type>(rows[n], scales[n], row, D, stride);
        to[n] = reinterpret_cast<const char*>(row);
      }
    });
    apart = step_.keys % kBlock == 0 ? stride * static_cast<int64_t>(sizeof(To)) : 0;
  }

  const PackedRows<Isa, Elem>& rows_;
  Step<kBlocks> step_;
};

}  // namespace specattn
