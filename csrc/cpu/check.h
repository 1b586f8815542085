// Checks lengths and indices before any key is read: a wrong one is an error, not a crash.
#pragma once

#include <stdexcept>
#include <string>

#include "problem.h"

namespace specattn {

// To Python an IndexError.
inline void check_index(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return;
  throw std::out_of_range(std::string(name) + ": expected values from " + std::to_string(low) +
                          " to " + std::to_string(high) + ", got " + std::to_string(value));
}

inline void check_page(const Cache& c, int64_t b, int64_t column, int64_t pages) {
  check_index("block_table", c.block_table[b * c.table_stride + column], 0, pages - 1);
}

// Tokens of a request, and the pages that they lie in.
inline void check_tokens(const Cache& c, int64_t b, int64_t tokens, int64_t pages) {
  const int64_t used = c.block_table ? ceil_div(tokens, c.page_size) : 0;
  for (int64_t column = 0; column < used; ++column) check_page(c, b, column, pages);
}

// Ragged queries: `starts` must deal all rows, up to `most` to each request.
inline void check_rows(const int32_t* starts, int64_t B, int64_t rows, int64_t most) {
  const auto refuse = [](const std::string& expected) {
    throw std::out_of_range("cu_seqlens_q: expected " + expected);
  };
  const auto text = [](int64_t number) { return std::to_string(number); };
  if (starts[0] != 0) refuse("to begin with 0, got " + text(starts[0]));
  for (int64_t b = 0; b < B; ++b) {
    const int64_t first = starts[b], stop = starts[b + 1];
    if (stop < first) refuse("no decrease, got " + text(stop) + " after " + text(first));
    if (stop - first > most) {
      refuse("up to max_seqlen_q=" + text(most) + " rows per request, got " + text(stop - first) +
             " of request " + text(b));
    }
  }
  if (starts[B] != rows) {
    refuse("to end with q's " + text(rows) + " rows, got " + text(starts[B]));
  }
}

// Lists of a gathered cache: what they count, their positions, and the pages that those lie in.
inline void check_lists(const Cache& c, int64_t B, int64_t heads, int64_t most, int64_t capacity,
                        int64_t pages) {
  constexpr const char* name = "index_lengths";
  for (int64_t b = 0; b < B; ++b) {
    if (c.prefix) check_index("cache_seqlens", c.prefix[b * c.prefix_batch], 0, capacity);
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t length = c.listed(b, h);
      if (length == -1 && !c.prefix) {
        throw std::out_of_range(std::string(name) + ": expected values from 0 to " +
                                std::to_string(most) + " without cache_seqlens, got -1");
      }
      if (length != -1) check_index(name, length, 0, most);
      if (length == -1) check_tokens(c, b, c.length(b, h), pages);
      const int32_t* list = c.indices + b * c.indices_batch + h * c.indices_head;
      for (int64_t i = 0; i < length; ++i) {
        check_index("indices", list[i], 0, capacity - 1);
        if (c.block_table) check_page(c, b, list[i] / c.page_size, pages);
      }
    }
  }
}

}  // namespace specattn
