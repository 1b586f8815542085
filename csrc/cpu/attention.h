// The one algorithm: packed query rows of some KV heads against a range of key blocks.
//
// A task reads each key once. For every block and head it multiplies all row tiles, so K and V come
// from memory once and from the caches for the other tiles. What remains is a State per head; the
// splits of a request are merged by finish.h in the order of the keys.
#pragma once

#include <utility>

#include "denormals.h"
#include "keys.h"
#include "odd_values.h"
#include "packed.h"
#include "products.h"
#include "products_matrix.h"
#include "products_rows.h"
#include "stored.h"

namespace specattn {

// Multiplies a task's keys by a policy, VectorProducts or MatrixProducts, and prefetches the step
// that comes next meanwhile.
template <class Products, class Isa, class Elem, class... Options>
void walk(const PackedRows<Isa, Elem>& rows, Options... options) {
  const Task& task = rows.task;
  const Keys<Elem, Products::kBlocks> keys(rows.a, rows.plan, task);
  Products products(rows, keys.starts(), options...);
  Step<Products::kBlocks> steps[2];
  Step<Products::kBlocks>*now = &steps[0], *next = &steps[1];
  Dequantised<Isa, Elem, Products::kBlocks> dequantised(rows);
  OddValues<Isa, Elem, Products::kBlocks> odd(rows);
  const int bytes = static_cast<int>(task.heads * rows.D * rows.a.cache.size);
  keys.load(*now, task.first_block);
  for (int64_t index = task.first_block; index < task.last_block;) {
    index += now->count;
    next->keys = 0;
    if (index < task.ahead_block) keys.load(*next, index);
    const int64_t ahead = next->keys;
    for (int64_t head = 0; head < task.heads; ++head) {
      if (head > 0) keys.advance(*now);
      const int first = static_cast<int>(ahead * head / task.heads);
      const int last = static_cast<int>(ahead * (head + 1) / task.heads);
      Prefetch prefetch = next->v_in_k ? Prefetch(next->k, first, last, bytes)
                                       : Prefetch(next->k, next->v, first, last, bytes);
      const auto& step = dequantised.template of<Products>(*now, head);
      products.multiply(odd.take_out(step, {head, 1}), head, prefetch);
      odd.add();
    }
    std::swap(now, next);
  }
}

// The same for a few rows, whose heads are multiplied together.
template <class Few, class Isa, class Elem>
void walk_rows(const PackedRows<Isa, Elem>& rows) {
  const Task& task = rows.task;
  const Keys<Elem, 1> keys(rows.a, rows.plan, task);
  RowProducts<Isa, Elem, Few> products(rows, keys.starts());
  OddValues<Isa, Elem, 1> odd(rows);
  Step<1> steps[2];
  keys.load(steps[0], task.first_block);
  for (int64_t index = task.first_block; index < task.last_block; ++index) {
    Step<1>&now = steps[(index - task.first_block) % 2],
    &next = steps[(index + 1 - task.first_block) % 2];
    next.keys = 0;
    if (index + 1 < task.ahead_block) keys.load(next, index + 1);
    products.multiply(odd.take_out(now, {0, task.heads}), next);
    odd.add();
  }
}

template <class Isa, class Elem>
void attend(const Attention& a, const Plan& plan, const Task& task, float* states,
            Scratch scratch) {
  [[maybe_unused]] const FlushToZero flush;
  [[maybe_unused]] typename Isa::Tiles tiles;
  const PackedRows<Isa, Elem> rows{a, plan, task, scratch, states};
  rows.start();
  if (task.first_block == task.last_block) return;
  if (rows.few && of_8_bits(a.cache.type)) {
    walk_rows<FewStoredProducts<Isa, Elem>>(rows);
  } else if (rows.few) {
    walk_rows<FewRowProducts<Isa, Elem>>(rows);
  } else if constexpr (kTiles<Isa, Elem>) {
    using Products = MatrixProducts<Isa, Elem>;
    walk<Products>(rows, false);
    if (!Products::has_to_pair(rows)) return;
    rows.start();
    walk<Products>(rows, true);
  } else {
    walk<VectorProducts<Isa, Elem>>(rows);
  }
}

}  // namespace specattn
