// The query rows of a task, packed: all rows of the heads that share a KV head, side by side, with
// the state of each.
#pragma once

#include <algorithm>
#include <cmath>

#include "address.h"
#include "convert.h"
#include "kernels.h"
#include "rows.h"
#include "rows_paired.h"
#include "state.h"
#include "visibility.h"

namespace specattn {

// Of a block of keys, by some rows together.
enum class Seen { kNothing, kSome, kAll };

// In tiles of kTile rows per head.
template <class Isa, class Elem>
struct PackedRows {
  const Attention& a;
  const Plan& plan;
  const Task& task;
  const Scratch scratch;
  float* const states;
  const int D = static_cast<int>(a.D), stride = static_cast<int>(plan.stride);
  const int Dv = static_cast<int>(a.Dv), v_stride = static_cast<int>(plan.v_stride);
  const int64_t count = task.rows.count * a.group();  // that exist; plan.rows with padding
  const bool few = takes_rows<Isa, Elem>(a, count);   // rows.h, not tile.h
  const bool ordered = a.scale > 0 || a.scale < 0;    // neither zero nor NaN
  // Of products before and after a softcap.
  const float logit_scale = ordered ? std::abs(a.scale) : 1.0f;
  const float scale = a.softcap == 0 ? logit_scale : 1.0f;

  State state(int64_t head) const {
    return {states + head * State::floats(plan.rows, v_stride), plan.rows, v_stride};
  }

  int tile_rows(int64_t tile) const {
    return static_cast<int>(std::min<int64_t>(kTile, plan.rows - tile));
  }

  // Per head and tile [unit][row], or as the products of few rows want them; what does not exist is
  // zero.
  float* queries(int64_t head, int64_t tile) const {
    const int64_t rows = few ? round_up(count, kRowsAbreast) : plan.rows;
    return scratch.q + (head * rows + tile) * stride;
  }

  void start() const {
    // What is multiplied, padding of tiles and of rows that go abreast included.
    const int64_t used = few ? round_up(count, kRowsAbreast) : plan.rows, g = a.group();
    for (int64_t head = 0; head < task.heads; ++head) {
      const State s = state(head);
      std::fill(s.acc, s.acc + used * v_stride, 0.0f);
      std::fill(s.m, s.m + used, -kInf);
      std::fill(s.l, s.l + used, 0.0f);
      std::fill(queries(head, 0), queries(head, 0) + used * stride, 0.0f);
      for (int64_t m = 0; m < count; ++m) {
        const char* q =
            row_of<Elem>(a.q, task.b, task.rows.first + m / g, (task.head + head) * g + m % g);
        pack(reinterpret_cast<const Elem*>(q), head, m);
      }
    }
  }

  // What the rows of a tile see of a block that not every row of the task sees whole; the words of
  // the rows are spread over the lanes of the tile.
  Seen seen(const Block& block, const uint64_t* words, int64_t tile, TileMask& spread) const {
    if (block.full) return Seen::kAll;
    const uint64_t whole = ~uint64_t{0} >> (kBlock - block.keys);
    uint64_t any = 0, all = whole;
    const int64_t g = a.group();
    for (int i = 0; i < tile_rows(tile); ++i) {
      const bool exists = tile + i < count;
      const uint64_t word = exists ? words[(tile + i) / g] : 0;
      spread.low[i] = static_cast<uint32_t>(word);
      spread.high[i] = static_cast<uint32_t>(word >> 32);
      any |= word;
      if (exists) all &= word;
    }
    return any == 0 ? Seen::kNothing : all == whole ? Seen::kAll : Seen::kSome;
  }

 private:
  // A query carries the sign of the scale, so that the greatest product is the greatest logit, or
  // all of a scale that has no order: what is masked afterwards is then -inf, not NaN.
  void pack(const Elem* q, int64_t head, int64_t m) const {
    const int64_t tile = m / kTile * kTile;
    const auto convert = [this](float x) {
      return a.scale > 0 ? x : a.scale < 0 ? -x : x * a.scale;
    };
    if (few && of_8_bits(a.cache.type)) {
      return FewStoredProducts<Isa, Elem>::pack(q, queries(head, 0), m, count, D, stride, convert);
    }
    if (few) return FewRowProducts<Isa, Elem>::pack(q, queries(head, 0), m, D, stride, convert);
    float* to = queries(head, tile) + m % kTile;
    const int64_t step = tile_rows(tile);
    if (Isa::template Dot<Elem>::kPair == 1 && !kTiles<Isa, Elem>) {
      for (int d = 0; d < D; ++d) to[d * step] = convert(to_float(q[d]));
      return;
    }
    if (a.scale > 0) {  // as it is
      for (int u = 0; u < D / 2; ++u) std::memcpy(to + u * step, q + 2 * u, 4);
      return;
    }
    for (int u = 0; u < D / 2; ++u) {
      Elem pair[2] = {q[2 * u], q[2 * u + 1]};
      for (Elem& x : pair) x = from_float<Elem>(convert(to_float(x)));
      std::memcpy(to + u * step, pair, 4);
    }
  }
};

}  // namespace specattn
