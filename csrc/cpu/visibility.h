// Which rows see which keys, block by block: one 64-bit word per row, for the prefix and the tree.
#pragma once

#include <algorithm>

#include "problem.h"

namespace specattn {

// Rows [first, first + count) of a request.
struct RowRange {
  int64_t first = 0, count = 0;
};

inline int64_t depth(const Attention& a, int64_t b, int64_t t) {
  const Tree& tree = a.tree;
  if (tree.depths) return tree.depths[b * tree.depths_batch + t];
  if (!tree.mask) return t + tree.size - a.T;
  int64_t seen = 0;
  const int64_t* words = tree.mask + b * tree.mask_batch + t * tree.mask_row;
  for (int64_t w = 0; w < ceil_div(tree.size, 64); ++w) {
    seen += __builtin_popcountll(static_cast<unsigned long long>(words[w]));
  }
  return seen - 1;
}

// First cached position that row t sees.
inline int64_t window_start(const Attention& a, int64_t b, int64_t length, int64_t t) {
  if (a.window == 0) return 0;
  return std::clamp<int64_t>(length + depth(a, b, t) - a.window + 1, 0, length);
}

// First cached position that all collected rows see.
inline int64_t collect_start(const Attention& a, int64_t b, int64_t length) {
  int64_t start = 0;
  for (int64_t i = 0; a.window && i < a.num_collect; ++i) {
    start = std::max(start, window_start(a, b, length, a.collect_rows[i]));
  }
  return start;
}

// First node of a chain that row t sees.
inline int64_t chain_start(const Attention& a, int64_t t) {
  return a.window ? std::max<int64_t>(t + a.tree.size - a.T - a.window + 1, 0) : 0;
}

// The blocks of keys that a range of rows can see: the prefix from `start` on, then the tree.
struct KeyRange {
  int64_t start = 0, length = 0, prefix_blocks = 0, tree_start = 0, tree_keys = 0, blocks = 0;

  KeyRange(const Attention& a, int64_t b, int64_t head, RowRange rows) : length(a.length(b, head)) {
    start = a.window ? length : 0;
    for (int64_t t = rows.first; a.window && t < rows.first + rows.count; ++t) {
      start = std::min(start, window_start(a, b, length, t));
    }
    prefix_blocks = ceil_div(length - start, kBlock);
    tree_keys = a.tree.size;
    if (!a.tree.mask) {  // a chain: nothing after the last row's own key, or before the window
      tree_keys = std::clamp<int64_t>(rows.first + rows.count + a.tree.size - a.T, 0, tree_keys);
      tree_start = std::min(chain_start(a, rows.first), tree_keys) / kBlock * kBlock;
    }
    blocks = prefix_blocks + ceil_div(tree_keys - tree_start, kBlock);
  }
};

// One block of keys. `words[i]` is what row `first + i` of the range sees; `seen` what any row
// sees, `shared` what all do.
struct Block {
  bool tree = false, full = true;
  int64_t first = 0;
  int keys = 0;
  uint64_t seen = 0, shared = 0;

  // What some rows see and others do not.
  uint64_t seen_by_some() const { return seen & ~shared; }

  void load(const Attention& a, int64_t b, const KeyRange& range, RowRange rows, int64_t index,
            const int64_t* starts, uint64_t* words) {
    tree = index >= range.prefix_blocks;
    const int64_t begin = tree ? (index - range.prefix_blocks) * kBlock + range.tree_start
                               : index * kBlock + range.start;
    const int64_t end = tree ? range.tree_keys : range.length;
    first = begin;
    keys = static_cast<int>(std::min<int64_t>(kBlock, end - begin));
    const uint64_t all = ~uint64_t{0} >> (kBlock - keys);
    seen = shared = all;
    full = true;
    if (!tree && !a.window) return;
    seen = 0;
    for (int64_t i = 0; i < rows.count; ++i) {
      words[i] = all & (tree ? tree_word(a, b, rows.first + i, begin) : from(starts[i] - begin));
      seen |= words[i];
      shared &= words[i];
    }
    full = shared == all;
  }

 private:
  // Bits from n on.
  static uint64_t from(int64_t n) { return n >= 64 ? 0 : ~uint64_t{0} << std::max<int64_t>(n, 0); }

  static uint64_t tree_word(const Attention& a, int64_t b, int64_t t, int64_t begin) {
    const Tree& tree = a.tree;
    if (tree.mask) {
      const int64_t* row = tree.mask + b * tree.mask_batch + t * tree.mask_row;
      return static_cast<uint64_t>(row[begin / 64]);
    }
    return ~from(t + tree.size - a.T + 1 - begin) & from(chain_start(a, t) - begin);
  }
};

}  // namespace specattn
