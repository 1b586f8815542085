#include "odd_values.h"

#include <vector>

namespace specattn {
namespace {

template <class Function>
void with_type(Dtype type, const Function& function) {
  if (type == Dtype::kFloat32) return function(Tag<float>{});
  if (type == Dtype::kBFloat16) return function(Tag<bf16>{});
  if (type == Dtype::kFloat16) return function(Tag<fp16>{});
  with_8_bits(type, function);
}

// The scale of a key's values, if it has one.
template <int kBlocks>
float scale_of(const Step<kBlocks>& step, int n, int64_t head) {
  return of_8_bits(step.type) && step.scaled ? step.v_scale_of(n, head) : 1.0f;
}

// Calls function(d, value times scale) for each odd value of a row.
template <class Function>
void for_odd(Dtype type, const char* row, int Dv, float scale, const Function& function) {
  const bool all = !std::isfinite(scale);
  with_type(type, [&](auto tag) {
    const auto* from = reinterpret_cast<const typename decltype(tag)::type*>(row);
    for (int d = 0; d < Dv; ++d) {
      const float x = to_float(from[d]);
      if (all || !std::isfinite(x)) function(d, x * scale);
    }
  });
}

}  // namespace

template <int kBlocks>
const Step<kBlocks>& without_odd_values(const Step<kBlocks>& step, HeadRange heads, int Dv) {
  static thread_local Step<kBlocks> to;
  static thread_local std::vector<char> values;
  static thread_local std::vector<float> scales;
  to = step;
  const int64_t size = size_of(step.type), bytes = Dv * size, all = heads.first + heads.count;
  values.resize(static_cast<size_t>(step.keys * heads.count * bytes));
  scales.resize(static_cast<size_t>(step.keys * all));
  for (int n = 0; n < step.keys; ++n) {
    const Block& block = step.blocks[n / kBlock];
    const uint64_t bit = uint64_t{1} << n % kBlock;
    if ((block.seen & bit) == 0) continue;  // is not read
    char* const row = values.data() + n * heads.count * bytes;
    for (int64_t h = 0; h < heads.count; ++h) {
      const char* const from = step.v[n] + h * step.v_head;
      float scale = scale_of(step, n, heads.first + h);
      char* const copy = row + h * bytes;
      std::memcpy(copy, from, static_cast<size_t>(bytes));
      if ((block.seen_by_some() & bit) != 0) {
        for_odd(step.type, from, Dv, scale,
                [&](int d, float) { std::memset(copy + d * size, 0, static_cast<size_t>(size)); });
        if (!std::isfinite(scale)) scale = 0;
      }
      scales[static_cast<size_t>(n * all + heads.first + h)] = scale;
    }
    to.v[n] = row;
    to.v_scale[n] = reinterpret_cast<const char*>(scales.data() + n * all);
  }
  to.v_head = bytes, to.v_scale_head = sizeof(float);
  to.v_apart = 0, to.v_in_k = false;
  return to;
}

template <int kBlocks>
void add_odd_values(const Step<kBlocks>& step, HeadRange heads, int64_t h, int Dv, RowSums sums) {
  for (int n = 0; n < step.keys; ++n) {
    const int block = n / kBlock;
    const uint64_t bit = uint64_t{1} << n % kBlock;
    if ((step.blocks[block].seen_by_some() & bit) == 0) continue;
    const float scale = scale_of(step, n, heads.first + h);
    for_odd(step.type, step.v[n] + h * step.v_head, Dv, scale, [&](int d, float value) {
      float* const column = sums.acc + (sums.place ? sums.place(d) : d);
      for (int64_t m = 0; m < sums.rows; ++m) {
        if ((step.words[block][m / sums.group] & bit) != 0) column[m * sums.stride] += value;
      }
    });
  }
}

template const Step<1>& without_odd_values(const Step<1>&, HeadRange, int);
template void add_odd_values(const Step<1>&, HeadRange, int64_t, int, RowSums);
template const Step<kMostKeys / kBlock>& without_odd_values(const Step<kMostKeys / kBlock>&,
                                                            HeadRange, int);
template void add_odd_values(const Step<kMostKeys / kBlock>&, HeadRange, int64_t, int, RowSums);

}  // namespace specattn
