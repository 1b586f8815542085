// Checks lengths and indices before any key is read: a wrong one is an error, not a crash.
#pragma once

#include <stdexcept>
#include <string>

#include "problem.h"

namespace specattn {

// What pybind11 turns into an IndexError.
inline void check_index(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return;
  throw std::out_of_range(std::string(name) + ": expected values from " + std::to_string(low) +
                          " to " + std::to_string(high) + ", got " + std::to_string(value));
}

inline void check_page(const Cache& c, int64_t b, int64_t column, int64_t pages) {
  check_index("block_table", c.block_table[b * c.table_stride + column], 0, pages - 1);
}

// `behind` tokens after each length are read too (a tree that lies in the cache).
inline void check_lengths(const Cache& c, const char* name, int64_t B, int64_t heads,
                          int64_t capacity, int64_t behind) {
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t length = c.lengths[b * c.lengths_batch + h * c.lengths_head];
      check_index(name, length, 0, capacity - behind);
    }
  }
}

inline void check_pages(const Cache& c, int64_t B, int64_t pages, int64_t behind) {
  for (int64_t b = 0; b < B && c.block_table; ++b) {
    const int64_t used = ceil_div(c.lengths[b * c.lengths_batch] + behind, c.page_size);
    for (int64_t column = 0; column < used; ++column) check_page(c, b, column, pages);
  }
}

// Positions of a gathered cache, and the pages that they lie in.
inline void check_positions(const Cache& c, int64_t B, int64_t heads, int64_t capacity,
                            int64_t pages) {
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t length = c.lengths[b * c.lengths_batch + h * c.lengths_head];
      const int32_t* list = c.indices + b * c.indices_batch + h * c.indices_head;
      for (int64_t i = 0; i < length; ++i) {
        check_index("indices", list[i], 0, capacity - 1);
        if (c.block_table) check_page(c, b, list[i] / c.page_size, pages);
      }
    }
  }
}

}  // namespace specattn
