// What is measured on a kind of machine, not compiled in: how far ahead is prefetched, how much is
// multiplied in one go, when threads pay. No value changes a bit of a result.
#pragma once

#include <cstdint>
#include <string>

namespace specattn {

constexpr int kMostAbreast = 8;  // heads, at most: their logits and sums stay in near caches

// As measured on Zen 3, Zen 4 and processors with AMX; tuned.h has what is better elsewhere.
struct Tuning {
  int64_t wide = 0;    // 1: two loads and two products of 512 bits take a cycle (Avx512Bf16Wide)
  int64_t panels = 0;  // 1: products of many rows by panels are faster than torch's
  int64_t lead_lines = 256;              // cache lines that PrefetchInOrder is ahead, at least
  int64_t heads_abreast = kMostAbreast;  // heads of a few rows that are multiplied together
  int64_t stream_ahead = 4096;           // bytes of each stream of weights that are prefetched
  int64_t tile_ahead = 8192;             // the same of tiles of codes
  int64_t key_ahead = 1024;              // the same of keys that are scored
  int64_t packed_bytes = 16384;          // of packed x in one go: half of an L1 cache
  int64_t panel_depth = 4096;            // elements along K of a panel: 384 KB
  int64_t state_floats = 4096;           // of a layer's state in one go: half of an L1 cache
  int64_t linear_pieces = 4;      // for each thread, so that one that was interrupted costs little
  int64_t thread_work = 1 << 18;  // bytes and multiplications: 0.01 ms of one thread
};

extern Tuning tuning;  // of the code path in use

// "wide=1 panels=0 ...": all values, or those that `set` changes. Throws std::invalid_argument.
std::string values_of(const Tuning&);
void set(Tuning&, const std::string& values);

// What the rows of a table have for a machine, "avx512_bf16 amd 26 48 1024": a code path, vendor,
// family, KiB of an L1 and an L2 cache. A row is for its machine and larger numbers; of several
// that are, the largest counts. Without any it is Tuning(). Every row is checked.
Tuning tuning_of(const std::string& machine, const std::string& table);
std::string machine_of(const std::string& isa);  // this one

}  // namespace specattn
