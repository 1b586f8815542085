// Where keys lie: tiles of the tree first, then tiles of the prefix, dealt to the teams in turn.
#pragma once

#include "params.cuh"
#include "shape.cuh"

// What one block attends to; the same in all its threads.
struct Work {
  int b, head, slot, T, S;
  i64 first_row;  // of a ragged request
  int length, listed, begin, end;
  int live;  // slots that this request uses
  int tree_tiles;
  bool ragged;
};

DEVICE i64 row_offset(const Work& w, i64 stride_b, int stride_t) {
  return w.ragged ? w.first_row * stride_t : w.b * stride_b;
}

// Keys of one split: the request's own length decides, never its cache's capacity.
DEVICE int split_size(const Split& s, int keys, int slots) {
  int count = min(s.wanted, (keys + s.least - 1) / s.least);
  count = max(count, (keys + s.most - 1) / s.most);
  count = max(min(count, slots), 1);
  int size = (keys + count - 1) / count;
  return max((size + kUnit - 1) / kUnit, 1) * kUnit;
}

// What a window leaves of a tree mask that comes whole. What a token sees is its path in the order
// of the keys, so it stands as deep as it sees keys, and its window drops the first of them.
struct Path {
  const u32* words;  // of the token's mask, 32 keys each
  int keys;          // of the tree

  DEVICE u32 word(int i) const {
    int left = keys - 32 * i;
    return left < 32 ? words[i] & ((1u << left) - 1) : words[i];
  }
  DEVICE int length() const {
    int seen = 0;
    for (int i = 0; 32 * i < keys; i++) seen += __popc(word(i));
    return seen;
  }
  // Word `i` without those of its bits that are among the lowest `dropped` of all.
  DEVICE u32 without_lowest(int i, int dropped) const {
    for (int before = 0; before < i; before++) dropped -= __popc(word(before));
    u32 left = word(i);
    for (; dropped > 0 && left; dropped--) left &= left - 1;
    return left;
  }
};

DEVICE Path path_of(const Params& p, const Work& w, int t) {
  i64 row = row_offset(w, p.mask_b, p.mask_t) + static_cast<i64>(t) * p.mask_t;
  return Path{p.tree_mask + 2 * row, w.S};
}

// The 16 bits of a tree mask that say which keys from `j0` on token `t` sees. `j0` is a multiple
// of 16.
DEVICE u32 tree_bits(const Params& p, const Work& w, int t, int j0) {
  u32 bits;
  if (p.tree_mask) {
    Path path = path_of(p, w, t);
    bool whole = !p.window || p.depths || p.window >= w.S;  // nothing is left to trim
    bits = whole ? path.words[j0 / 32] : path.without_lowest(j0 / 32, path.length() - p.window);
    bits >>= j0 % 32;
  } else {  // a causal chain, which backends window themselves
    int last = t + w.S - w.T, first = p.window ? last + 1 - p.window : 0;
    int upto = min(max(last + 1 - j0, 0), 16), from = min(max(first - j0, 0), 16);
    bits = (1u << upto) - (1u << min(from, upto));
  }
  int left = w.S - j0;
  return left < 16 ? bits & ((1u << max(left, 0)) - 1) : bits & 0xffff;
}

// Which keys from `j0` on any token sees: the others may hold anything and are not read.
DEVICE u32 seen_tree_bits(const Params& p, const Work& w, int j0) {
  u32 seen = 0;
  for (int t = threadIdx.x % 32; t < w.T; t += 32) seen |= tree_bits(p, w, t, j0);
  return __reduce_or_sync(kWholeWarp, seen);
}

// Copies a team's tiles, one after the other. With tables between a key's number and its address,
// those of the next tiles are looked up while this one is copied, so that no copy waits for them.
template <bool TABLES>
struct Keys {
  const Params& p;
  const Work& w;
  int team, row, piece;  // this lane's
  u32 shared;            // of its first piece in stage 0
  int ahead;             // number of the team's next tile
  const u16 *k, *v;      // of this head and piece
  int position[kPasses], location[kPasses];

  DEVICE Keys(const Params& p, const Work& w, int team, u32 pipeline) : p(p), w(w), team(team) {
    int thread = threadIdx.x % kTeamThreads;
    int number = thread / kLanesPerRow;  // eight lanes write to all banks at once
    row = number / 8 * 8 + number % kRowsAtOnce * kLanesPerRow + number % 8 / kRowsAtOnce;
    piece = thread % kLanesPerRow;
    shared = pipeline + team * kStages * kStageBytes + row * kPitch + piece * 16;
    k = p.k_cache + w.head * p.k_h + piece * 8 + (p.block_table ? 0 : w.b * p.k_b);
    v = p.v_cache + w.head * p.v_h + piece * 8 + (p.block_table ? 0 : w.b * p.v_b);
    ahead = team;
    if constexpr (TABLES) {
      find_positions(ahead);
      find_pages();
      find_positions(ahead + kTeams);
    }
  }

  DEVICE int first_key(int tile) const { return w.begin + (tile - w.tree_tiles) * kKeys; }

  // The logical positions of the keys of a tile, as far as there are any.
  DEVICE void find_positions(int tile) {
#pragma unroll
    for (int i = 0; i < kPasses; i++) {
      int n = first_key(tile) + row + i * kRowsPerPass;
      position[i] = n;
      if (p.indices && tile >= w.tree_tiles && n < min(w.end, w.listed)) {
        position[i] = p.indices[w.b * p.indices_b + w.head * p.indices_h + n];
      }
    }
  }

  // Returns the page that holds a position, which becomes a row of it.
  DEVICE int page_of(int& n) const {
    u64 product = static_cast<u64>(static_cast<u32>(n)) * p.page_magic;
    int column = static_cast<int>(product >> p.page_shift);
    n -= column * p.page_size;
    return p.block_table[static_cast<i64>(w.b) * p.table_b + column];
  }
  // From the first key of the cache, or of page 0, to a row of page `in`.
  DEVICE void go_to(const u16*& k_row, const u16*& v_row, int n, int in) const {
    k_row += static_cast<i64>(n) * p.k_n + in * p.k_b;
    v_row += static_cast<i64>(n) * p.v_n + in * p.v_b;
  }

  // Turns positions into what they are in memory: a row, or a page and a row of it.
  int page[kPasses];
  DEVICE void find_pages() {
#pragma unroll
    for (int i = 0; i < kPasses; i++) {
      location[i] = position[i];
      page[i] = 0;
    }
    if (p.block_table && ahead >= w.tree_tiles) {
#pragma unroll
      for (int i = 0; i < kPasses; i++) {
        if (first_key(ahead) + row + i * kRowsPerPass < w.end) page[i] = page_of(location[i]);
      }
    }
  }

  template <bool WHOLE>
  DEVICE void copy(u32 to, int pass, const u16* k_row, const u16* v_row, bool valid) {
#pragma unroll
    for (int c = 0; c < kPieces; c++) {
      bool exists = kColumns % kLanesPerRow == 0 || piece + c * kLanesPerRow < kColumns;
      u32 at = to + pass * kRowsPerPass * kPitch + c * kLanesPerRow * 16;
      if (exists) {
        if constexpr (WHOLE) {
          copy_async(at, k_row + c * kLanesPerRow * 8);
          copy_async(at + kKeyBytes, v_row + c * kLanesPerRow * 8);
        } else {
          copy_async(at, k_row + c * kLanesPerRow * 8, valid);
          copy_async(at + kKeyBytes, v_row + c * kLanesPerRow * 8, valid);
        }
      }
    }
  }

  template <bool WHOLE>
  DEVICE void copy_prefix(u32 to) {
    int n0 = first_key(ahead) + row;
#pragma unroll
    for (int i = 0; i < kPasses; i++) {
      int n = n0 + i * kRowsPerPass;
      bool valid = WHOLE || n < w.end;
      const u16 *k_row = k, *v_row = v;
      if (valid) go_to(k_row, v_row, TABLES ? location[i] : n, TABLES ? page[i] : 0);
      copy<WHOLE>(to, i, k_row, v_row, valid);
    }
  }

  DEVICE void copy_tree(u32 to) {
    int j0 = ahead * kKeys;
    u32 seen = seen_tree_bits(p, w, j0);
    if constexpr (kKeys == 32) seen |= seen_tree_bits(p, w, j0 + 16) << 16;
#pragma unroll
    for (int i = 0; i < kPasses; i++) {
      int j = row + i * kRowsPerPass;
      bool valid = seen >> j & 1;
      const u16 *k_row = k, *v_row = v;
      j += j0;
      if (p.tree == 1) {
        k_row = p.k_tree + row_offset(w, p.k_tree_b, p.k_tree_n) + w.head * p.k_tree_h + piece * 8;
        v_row = p.v_tree + row_offset(w, p.v_tree_b, p.v_tree_n) + w.head * p.v_tree_h + piece * 8;
        if (valid) {
          k_row += static_cast<i64>(j) * p.k_tree_n;
          v_row += static_cast<i64>(j) * p.v_tree_n;
        }
      } else if (valid) {
        int n = w.length + j, in = p.block_table ? page_of(n) : 0;
        go_to(k_row, v_row, n, in);
      }
      copy<false>(to, i, k_row, v_row, valid);
    }
  }

  // Starts the copies of the team's next tile into a stage, if there is one; always a group.
  DEVICE void copy_next(int stage, int tiles) {
    if (ahead < tiles) {
      u32 to = shared + stage * kStageBytes;
      if (ahead < w.tree_tiles) {
        copy_tree(to);
      } else if (first_key(ahead) + kKeys <= w.end) {
        copy_prefix<true>(to);
      } else {
        copy_prefix<false>(to);
      }
      ahead += kTeams;
      if constexpr (TABLES) {
        find_pages();
        find_positions(ahead + kTeams);
      }
    }
    commit_copies();
  }

  // Makes numbers of the values of a stage that rows see differently: a weight of 0 times NaN would
  // be NaN. Each lane looks at what it has copied; into the bytes between rows of keys goes whether
  // it found any, for `keys_of_no_number`.
  DEVICE void clean_values(int stage) const {
    u32 from = shared + stage * kStageBytes + kKeyBytes;
#pragma unroll
    for (int i = 0; i < kPasses; i++) {
      u32 at = from + i * kRowsPerPass * kPitch, sum = 0, four[4];
#pragma unroll
      for (int c = 0; c < kPieces; c++) {
        if (kColumns % kLanesPerRow == 0 || piece + c * kLanesPerRow < kColumns) {
          load_shared(four, at + c * kLanesPerRow * 16);
#pragma unroll
          for (int e = 0; e < 4; e++) sum = add_no_numbers(four[e], sum);
        }
      }
      store_shared(at - kKeyBytes + kFlags - piece * 14, static_cast<u16>(sum != 0));
      if (sum == 0) continue;
#pragma unroll 1
      for (int c = piece; c < kColumns; c += kLanesPerRow, at += kLanesPerRow * 16) {
        load_shared(four, at);
#pragma unroll
        for (int e = 0; e < 4; e++) four[e] = numbers_of(four[e]);
        store_shared(at, four);
      }
    }
  }
};

// Which keys of a team's stage had a value that is NaN or infinite, behind `clean_values` and a
// barrier: a row that sees one is to say NaN.
DEVICE u32 keys_of_no_number(u32 stage, int lane) {
  u32 flags[4] = {0, 0, 0, 0};
  if (lane < kKeys) {
    load_shared(flags, stage + lane * kPitch + kFlags);
    u32 found = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (2 * i < kLanesPerRow) found |= flags[i];
    }
    flags[0] = found;
  }
  return __ballot_sync(kWholeWarp, flags[0] != 0);
}
