// A request of ragged queries as the uniform call that it is when it comes alone.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "problem.h"

namespace specattn {

class Requests {
 public:
  // One per request; the memory is kept for the next call.
  const std::vector<Attention>& of(const Attention& a) {
    requests_.clear();
    rows_.resize(static_cast<size_t>(a.B * a.num_collect));
    for (int64_t b = 0; b < a.B; ++b) requests_.push_back(request(a, b));
    return requests_;
  }

 private:
  Attention request(const Attention& a, int64_t b) {
    Attention one = a;
    const int64_t first = a.q_starts[b], size = size_of(a.dtype);
    one.q_starts = nullptr;
    one.B = 1, one.T = a.rows(b);
    one.q.data = moved(a.q.data, first * a.q.token * size);
    one.out = moved(a.out, first * a.out_row * size);
    one.lse += first * a.lse_row;
    move_tree(one.tree, one.T, first, size);
    move_cache(one.cache, b);
    move_collected(one, b);
    if (one.T == 0) see_nothing(one);
    return one;
  }

  static void move_tree(Tree& tree, int64_t rows, int64_t first, int64_t size) {
    tree.size = tree.size > 0 ? rows : 0;
    tree.k.data = moved(tree.k.data, first * tree.k.token * size);
    tree.v.data = moved(tree.v.data, first * tree.v.token * size);
    if (tree.mask) tree.mask += first * tree.mask_row;
    if (tree.depths) tree.depths += first;
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
