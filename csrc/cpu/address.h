// The address of a token: contiguous, paged and gathered caches differ in nothing else.
#pragma once

#include "problem.h"

namespace specattn {

template <class Elem>
inline const char* row_of(const Rows& rows, int64_t outer, int64_t token, int64_t head) {
  return reinterpret_cast<const char*>(static_cast<const Elem*>(rows.data) + outer * rows.outer +
                                       token * rows.token + head * rows.head);
}

// Where two kinds of rows lie, in bytes: keys and values, or their scales.
struct Layout {
  const char *k, *v;
  int64_t k_outer, k_token, k_head, v_outer, v_token, v_head;

  Layout(const Rows& k, const Rows& v, int64_t size)
      : k(static_cast<const char*>(k.data)),
        v(static_cast<const char*>(v.data)),
        k_outer(k.outer * size),
        k_token(k.token * size),
        k_head(k.head * size),
        v_outer(v.outer * size),
        v_token(v.token * size),
        v_head(v.head * size) {}
};

// Rows of `count` cached tokens from `first` on (positions in the index list, if there is one).
inline void rows_at(const Cache& c, const Layout& rows, int64_t b, int64_t head, int64_t first,
                    int count, const char** k, const char** v) {
  const int32_t* list = nullptr;
  if (c.indices && c.listed(b, head) >= 0) {
    list = c.indices + b * c.indices_batch + head * c.indices_head;
  }
  const int32_t* table = c.block_table ? c.block_table + b * c.table_stride : nullptr;
  const char* k_page = rows.k + (table ? 0 : b) * rows.k_outer + head * rows.k_head;
  const char* v_page = rows.v + (table ? 0 : b) * rows.v_outer + head * rows.v_head;
  if (!list && !table) {
    for (int n = 0; n < count; ++n) {
      k[n] = k_page + (first + n) * rows.k_token;
      v[n] = v_page + (first + n) * rows.v_token;
    }
    return;
  }
  for (int n = 0; n < count; ++n) {
    const int64_t position = list ? list[first + n] : first + n;
    const int64_t page = table ? table[position / c.page_size] : 0;
    const int64_t slot = table ? position % c.page_size : position;
    k[n] = k_page + page * rows.k_outer + slot * rows.k_token;
    v[n] = v_page + page * rows.v_outer + slot * rows.v_token;
  }
}

inline void cached_rows(const Cache& c, int64_t b, int64_t head, int64_t first, int count,
                        const char** k, const char** v) {
  rows_at(c, {c.k, c.v, c.size}, b, head, first, count, k, v);
}

// The same of their scales.
inline void scale_rows(const Cache& c, int64_t b, int64_t head, int64_t first, int count,
                       const char** k, const char** v) {
  rows_at(c, {c.k_scale, c.v_scale, sizeof(float)}, b, head, first, count, k, v);
}

// Rows of `count` keys of a tree that does not lie in the cache, from `first` on.
template <class Elem>
inline void tree_rows(const Attention& a, int64_t b, int64_t head, int64_t first, int count,
                      const char** k, const char** v) {
  for (int n = 0; n < count; ++n) {
    k[n] = row_of<Elem>(a.tree.k, b, first + n, head);
    v[n] = row_of<Elem>(a.tree.v, b, first + n, head);
  }
}

}  // namespace specattn
