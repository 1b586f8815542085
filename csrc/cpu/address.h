// The address of a token: contiguous, paged and gathered caches differ in nothing else.
#pragma once

#include "problem.h"

namespace specattn {

template <class Elem>
inline const char* row_of(const Rows& rows, int64_t outer, int64_t token, int64_t head) {
  return reinterpret_cast<const char*>(static_cast<const Elem*>(rows.data) + outer * rows.outer +
                                       token * rows.token + head * rows.head);
}

// Rows of `count` cached tokens from `first` on (positions in the index list, if there is one).
template <class Elem>
inline void cached_rows(const Cache& c, int64_t b, int64_t head, int64_t first, int count,
                        const char** k, const char** v) {
  const int32_t* list = nullptr;
  if (c.indices && c.listed(b, head) >= 0) {
    list = c.indices + b * c.indices_batch + head * c.indices_head;
  }
  const int32_t* table = c.block_table ? c.block_table + b * c.table_stride : nullptr;
  const char* k_page = row_of<Elem>(c.k, table ? 0 : b, 0, head);
  const char* v_page = row_of<Elem>(c.v, table ? 0 : b, 0, head);
  const int64_t size = sizeof(Elem);
  if (!list && !table) {
    for (int n = 0; n < count; ++n) {
      k[n] = k_page + (first + n) * c.k.token * size;
      v[n] = v_page + (first + n) * c.v.token * size;
    }
    return;
  }
  for (int n = 0; n < count; ++n) {
    const int64_t position = list ? list[first + n] : first + n;
    const int64_t page = table ? table[position / c.page_size] : 0;
    const int64_t slot = table ? position % c.page_size : position;
    k[n] = k_page + (page * c.k.outer + slot * c.k.token) * size;
    v[n] = v_page + (page * c.v.outer + slot * c.v.token) * size;
  }
}

// Rows of `count` keys of the tree from `first` on.
template <class Elem>
inline void tree_rows(const Attention& a, int64_t b, int64_t head, int64_t first, int count,
                      const char** k, const char** v) {
  if (a.tree.in_cache) {
    cached_rows<Elem>(a.cache, b, head, a.length(b, head) + first, count, k, v);
    return;
  }
  for (int n = 0; n < count; ++n) {
    k[n] = row_of<Elem>(a.tree.k, b, first + n, head);
    v[n] = row_of<Elem>(a.tree.v, b, first + n, head);
  }
}

}  // namespace specattn
