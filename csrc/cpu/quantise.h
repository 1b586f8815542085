// Keys and values as they are stored: rounded to 8 bits where a cache has those.
#pragma once

#include <algorithm>
#include <cmath>

#include "convert.h"
#include "problem.h"

namespace specattn {

// A row over its scale, which is chosen and written where that is asked for.
template <class From, class To>
inline void quantise(const From* from, To* to, int64_t count, float* scale, bool dynamic) {
  constexpr float kLeastScale = 1e-6f;
  if (dynamic) {
    float most = 0.0f;
    bool nan = false;
    for (int64_t i = 0; i < count; ++i) {
      const float x = std::abs(to_float(from[i]));
      most = std::max(most, x);
      nan |= x != x;
    }
    *scale =
        nan ? std::numeric_limits<float>::quiet_NaN() : std::max(most / kMost<To>, kLeastScale);
  }
  const float divisor = *scale;
  for (int64_t i = 0; i < count; ++i) to[i] = from_float<To>(to_float(from[i]) / divisor);
}

// A head of a new key or value into its slot of a cache, where one of 8 bits has its scale written.
template <class Elem>
inline void store_head(const RotateHeads& p, const Elem* from, bool is_key, int64_t b, int64_t slot,
                       int64_t h) {
  const Rows &cache = is_key ? p.k_cache : p.v_cache, &scales = is_key ? p.k_scale : p.v_scale;
  const auto place = [&](const Rows& x) { return b * x.outer + slot * x.token + h * x.head; };
  void* const data = const_cast<void*>(cache.data);
  if (!of_8_bits(p.cache_dtype)) {
    std::memcpy(static_cast<Elem*>(data) + place(cache), from,
                static_cast<size_t>(p.D) * sizeof(Elem));
    return;
  }
  float* const scale = static_cast<float*>(const_cast<void*>(scales.data)) + place(scales);
  with_8_bits(p.cache_dtype, [&](auto tag) {
    using To = typename decltype(tag)::type;
    quantise(from, static_cast<To*>(data) + place(cache), p.D, scale, true);
  });
}

}  // namespace specattn
