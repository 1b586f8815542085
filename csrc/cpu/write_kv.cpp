// New keys and values into their slots of a cache: a copy, or a conversion, of each head.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "convert.h"
#include "quantise.h"
#include "run.h"
#include "team.h"

namespace specattn {
namespace {

constexpr int64_t kTokensPerPiece = 16;

template <class From, class To>
inline void copy(const From* from, To* to, int64_t count) {
  if constexpr (std::is_same_v<From, To>) {
    std::memcpy(to, from, static_cast<size_t>(count) * sizeof(To));
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = from_float<To>(to_float(from[i]));
  }
}

// Keys, or values, and where they go: `D` columns of each head.
struct Store {
  const Rows &rows, &cache, &scales;
  int64_t D;
  bool dense;
};

// All heads of one token; heads that lie one after the other are one copy.
template <class From, class To>
inline void write_token(const WriteKV& p, const Store& of, int64_t b, int64_t t, int64_t slot) {
  const From* from = static_cast<const From*>(of.rows.data) + b * of.rows.outer + t * of.rows.token;
  const auto place = [&](const Rows& x) {
    return slot / p.page_size * x.outer + slot % p.page_size * x.token;
  };
  const Rows &cache = of.cache, &scales = of.scales;
  To* to = static_cast<To*>(const_cast<void*>(cache.data)) + place(cache);
  if constexpr (sizeof(To) == 1) {
    float* const scale = static_cast<float*>(const_cast<void*>(scales.data)) + place(scales);
    for (int64_t h = 0; h < p.Hk; ++h) {
      quantise(from + h * of.rows.head, to + h * cache.head, of.D, scale + h * scales.head,
               p.dynamic);
    }
    return;
  }
  if (of.dense) return copy(from, to, p.Hk * of.D);
  for (int64_t h = 0; h < p.Hk; ++h) copy(from + h * of.rows.head, to + h * cache.head, of.D);
}

template <class From, class To>
void write_tokens(const WriteKV& p, int64_t first, int64_t last) {
  const Store keys = {p.k, p.k_cache, p.k_scale, p.D, p.k_dense};
  const Store values = {p.v, p.v_cache, p.v_scale, p.Dv, p.v_dense};
  for (int64_t i = first; i < last; ++i) {
    const int64_t b = i / p.T, t = i % p.T, slot = p.slot(b, t);
    if (slot < 0) continue;
    write_token<From, To>(p, keys, b, t, slot);
    if (p.v.data) write_token<From, To>(p, values, b, t, slot);
  }
}

using Write = void (*)(const WriteKV&, int64_t first, int64_t last);
template <class From>
constexpr Write kWrites[6] = {write_tokens<From, float>, write_tokens<From, bf16>,
                              write_tokens<From, fp16>,  write_tokens<From, int8_t>,
                              write_tokens<From, e4m3>,  write_tokens<From, e5m2>};

Write write_of(Dtype from, Dtype to) {
  constexpr const Write* kFrom[3] = {kWrites<float>, kWrites<bf16>, kWrites<fp16>};
  return kFrom[static_cast<int>(from)][static_cast<int>(to)];
}

}  // namespace

void run(const WriteKV& p, int threads) {
  const int64_t tokens = p.B * p.T, pieces = ceil_div(tokens, kTokensPerPiece);
  constexpr int64_t kBytesPerElement = 4;  // read and written, in 16 bits
  const auto write = write_of(p.dtype, p.cache_dtype);
  threads = useful_threads(tokens * p.Hk * (p.D + p.Dv) * kBytesPerElement, pieces, threads);
  if (threads == 1) return write(p, 0, tokens);
  parallel(threads, pieces, [&](int64_t i, int) {
    write(p, i * kTokensPerPiece, std::min(tokens, (i + 1) * kTokensPerPiece));
  });
}

}  // namespace specattn
