// A request of ragged queries, or a row with a list of its own, as the uniform call that it is when
// it comes alone.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "problem.h"

namespace specattn {

class Requests {
 public:
  // One per request, or per row; the memory is kept for the next call.
  const std::vector<Attention>& of(const Attention& a) {
    requests_.clear();
    rows_.resize(static_cast<size_t>(a.B * a.num_collect));
    for (int64_t b = 0; b < a.B; ++b) {
      const Attention one = request(a, b);
      if (!a.cache.per_row) requests_.push_back(one);
      for (int64_t t = 0; a.cache.per_row && t < one.T; ++t) requests_.push_back(row(one, t));
    }
    return requests_;
  }

 private:
  Attention request(const Attention& a, int64_t b) {
    Attention one = a;
    const int64_t size = size_of(a.dtype);
    one.q_starts = nullptr;
    one.B = 1, one.T = a.rows(b);
    one.q.data = moved(a.q.data, b * a.q.outer * size);
    one.out = moved(a.out, b * a.out_batch * size);
    one.lse += b * a.lse_batch;
    move_keys(one.tree, b * a.tree.k.outer, b * a.tree.v.outer, size);
    if (one.tree.mask) one.tree.mask += b * a.tree.mask_batch;
    if (a.q_starts) {
      const int64_t first = a.q_starts[b];
      move_rows(one, first);
      move_keys(one.tree, first * a.tree.k.token, first * a.tree.v.token, size);
      if (one.tree.depths) one.tree.depths += first;
      one.tree.size = one.tree.size > 0 ? one.T : 0;
    }
    move_cache(one.cache, b);
    move_collected(one, b);
    if (one.T == 0) see_nothing(one);
    return one;
  }

  // The t-th row of a request; what a chain shows it are all keys that are left.
  static Attention row(const Attention& request, int64_t t) {
    Attention one = request;
    one.T = 1;
    move_rows(one, t);
    if (!one.tree.mask) {
      one.tree.size = std::clamp<int64_t>(t + 1 + one.tree.size - request.T, 0, one.tree.size);
    }
    return one;
  }

  // To the rows from `first` on; lists go with them.
  static void move_rows(Attention& one, int64_t first) {
    const int64_t size = size_of(one.dtype);
    one.q.data = moved(one.q.data, first * one.q.token * size);
    one.out = moved(one.out, first * one.out_row * size);
    one.lse += first * one.lse_row;
    if (one.tree.mask) one.tree.mask += first * one.tree.mask_row;
    if (!one.cache.per_row) return;
    one.cache.indices += first * one.cache.indices_row;
    one.cache.lengths += first * one.cache.lengths_row;
  }

  static void move_keys(Tree& tree, int64_t k, int64_t v, int64_t size) {
    tree.k.data = moved(tree.k.data, k * size);
    tree.v.data = moved(tree.v.data, v * size);
  }

  static void move_cache(Cache& cache, int64_t b) {
    if (cache.block_table) {
      cache.block_table += b * cache.table_stride;
    } else {
      for (Rows* rows : {&cache.k, &cache.v}) {
        rows->data = moved(rows->data, b * rows->outer * cache.size);
      }
      for (Rows* rows : {&cache.k_scale, &cache.v_scale}) {
        rows->data = moved(rows->data, b * rows->outer * static_cast<int64_t>(sizeof(float)));
      }
    }
    cache.lengths += b * cache.lengths_batch;
    if (cache.indices) cache.indices += b * cache.indices_batch;
    if (cache.prefix) cache.prefix += b * cache.prefix_batch;
  }

  // A row that the request does not have is its last one, or its first.
  void move_collected(Attention& one, int64_t b) {
    if (one.collect == Collect::kNone) return;
    const int64_t size = one.collect == Collect::kScores ? 4 : 2;
    one.collected = moved(one.collected, b * one.collected_batch * size);
    int64_t* const rows = rows_.data() + b * one.num_collect;
    for (int64_t i = 0; i < one.num_collect; ++i) {
      const int64_t row = one.collect_rows[i];
      rows[i] = row < 0 ? std::max<int64_t>(one.T + row, 0) : std::min(row, one.T - 1);
    }
    one.collect_rows = rows;
  }

  // Without rows nothing is read, and all that is collected is -inf.
  static void see_nothing(Attention& one) {
    static const int32_t nothing = 0;
    one.window = 0;
    one.cache.lengths = &nothing;
    one.cache.lengths_head = 0;
  }

  template <class T>
  static T* moved(T* from, int64_t bytes) {
    using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
    return from ? static_cast<Byte*>(from) + bytes : from;
  }

  std::vector<Attention> requests_;
  std::vector<int64_t> rows_;  // that they collect
};

}  // namespace specattn
