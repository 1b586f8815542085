// The keys of a task, step by step: each block, the rows that see it, and its addresses.
#pragma once

#include <algorithm>

#include "address.h"
#include "kernels.h"
#include "visibility.h"

namespace specattn {

// Up to kBlocks blocks of one head that are multiplied together.
template <int kBlocks>
struct Step {
  static constexpr int kKeys = kBlocks * kBlock;
  int count, keys;
  Block blocks[kBlocks];
  uint64_t words[kBlocks][kGroupRows];
  const char *k[kKeys + kKeyStep], *v[kKeys + 1];  // padded: with the last key, with zeros
  int64_t k_apart, v_apart;  // bytes from row to row where that is always the same, else 0
  int64_t k_head, v_head;    // bytes from head to head
  bool v_in_k;               // values are what their keys begin with
  Dtype type;                // of an element
  bool scaled;               // by numbers that lie here:
  const char *k_scale[kKeys], *v_scale[kKeys];
  int64_t k_scale_head, v_scale_head;

  // Of a key's values, of so many heads further on.
  float v_scale_of(int n, int64_t head) const {
    float scale;
    std::memcpy(&scale, v_scale[n] + head * v_scale_head, sizeof scale);
    return scale;
  }

  // What loaded elements of keys or values are multiplied with, so many heads further on: a scale,
  // 1 without one and for a key that no row sees, and the kUnit of elements that are `over` it.
  bool multiplies(bool over) const { return scaled || (over && type == Dtype::kFloat8E4M3); }
  void scales(const char* const (&rows)[kKeys], int64_t head, bool over, float* to) const {
    const float unit = over && type == Dtype::kFloat8E4M3 ? kUnit<e4m3> : 1.0f;
    std::fill(to, to + keys, unit);
    for (int i = 0; scaled && i < count; ++i) {
      const auto load = [&](int n) {
        float scale;
        std::memcpy(&scale, rows[n] + head, sizeof scale);
        to[n] = scale * unit;
      };
      const Block& block = blocks[i];
      const int first = i * kBlock;
      if (block.full) {
        for (int n = 0; n < block.keys; ++n) load(first + n);
      } else {
        for (uint64_t left = block.seen; left != 0; left &= left - 1) {
          load(first + __builtin_ctzll(left));
        }
      }
    }
  }
};

// What is read in the place of a key that no row sees, and beside an odd one.
alignas(64) inline const float kNothing[kMaxHeadDim] = {};

template <class Elem, int kBlocks>
class Keys {
 public:
  using Step = specattn::Step<kBlocks>;

  Keys(const Attention& a, const Plan& plan, const Task& task)
      : a_(a),
        task_(task),
        range_(a, task.b, task.head, task.rows),
        together_(plan.rows > kManyRows ? kBlocks : 1) {
    for (int64_t t = 0; a.window && t < task.rows.count; ++t) {
      starts_[t] = window_start(a, task.b, range_.length, task.rows.first + t);
    }
  }

  // First position of the cache that each row of the task sees; only where there is a window.
  const int64_t* starts() const { return starts_; }

  // Whole blocks of the prefix go together where rows are many; one of fewer keys, or of the tree,
  // goes alone.
  void load(Step& step, int64_t index) const {
    const int64_t whole = (range_.length - range_.start) / kBlock;
    const int64_t left = std::min(whole, task_.last_block) - index;
    step.count = static_cast<int>(std::clamp<int64_t>(left, 1, together_));
    step.keys = 0;
    for (int i = 0; i < step.count; ++i) {
      Block& block = step.blocks[i];
      block.load(a_, task_.b, range_, task_.rows, index + i, starts_, step.words[i]);
      const char **k = step.k + step.keys, **v = step.v + step.keys;
      if (block.tree && !a_.tree.in_cache) {
        tree_rows<Elem>(a_, task_.b, task_.head, block.first, block.keys, k, v);
      } else {
        const int64_t first = block.first + (block.tree ? range_.length : 0);
        cached_rows(a_.cache, task_.b, task_.head, first, block.keys, k, v);
        if (a_.cache.scaled()) {
          scale_rows(a_.cache, task_.b, task_.head, first, block.keys, step.k_scale + step.keys,
                     step.v_scale + step.keys);
        }
      }
      step.keys += block.keys;
    }
    for (int n = step.keys; n < Step::kKeys + kKeyStep; ++n) step.k[n] = step.k[step.keys - 1];
    hide(step);
    step.k_apart = apart(step.k, step.keys);
    step.v_apart = apart(step.v, step.keys);
    const bool own = step.blocks[0].tree && !a_.tree.in_cache;
    step.type = own ? a_.dtype : a_.cache.type;
    const int64_t size = size_of(step.type);
    step.scaled = !own && a_.cache.scaled();
    step.k_scale_head = a_.cache.k_scale.head * sizeof(float);
    step.v_scale_head = a_.cache.v_scale.head * sizeof(float);
    const Rows &k_rows = own ? a_.tree.k : a_.cache.k, &v_rows = own ? a_.tree.v : a_.cache.v;
    step.k_head = k_rows.head * size, step.v_head = v_rows.head * size;
    step.v_in_k = v_rows.begin_where(k_rows) && a_.Dv <= a_.D;
  }

  // Moves the addresses to the next head.
  void advance(Step& step) const {
    for (int n = 0; n < Step::kKeys + kKeyStep; ++n) step.k[n] += step.k_head;
    for (int n = 0; n < step.keys; ++n) step.v[n] += step.v_head;
    hide(step);
  }

 private:
  static int64_t apart(const char* const* rows, int keys) {
    const int64_t bytes = rows[1] - rows[0];
    bool same = keys % kBlock == 0;
    for (int n = 2; n < keys; ++n) same &= rows[n] - rows[n - 1] == bytes;
    return same ? bytes : 0;
  }

  // Keys that no row sees may hold anything, NaN included: they are not read.
  static void hide(Step& step) {
    const char* const nothing = reinterpret_cast<const char*>(kNothing);
    step.v[step.keys] = nothing;
    for (int i = 0; i < step.count; ++i) {
      const Block& block = step.blocks[i];
      for (int n = 0; !block.full && n < block.keys; ++n) {
        if (block.seen >> n & 1) continue;
        step.k[i * kBlock + n] = step.v[i * kBlock + n] = nothing;
      }
    }
  }

  const Attention& a_;
  const Task& task_;
  const KeyRange range_;
  const int64_t together_;
  int64_t starts_[kGroupRows];
};

}  // namespace specattn
