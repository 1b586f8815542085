// Reads memory and multiplies registers: the ceilings that kernels are held against.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <vector>

#include "kernels.h"
#include "run.h"
#include "team.h"
#include "types.h"

namespace specattn {
namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kStreams = 4;  // read side by side: the prefetcher follows each

#if defined(__x86_64__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
void
read_lines(const char* data, int64_t lines) {
  typedef int64_t Lane __attribute__((vector_size(kLine)));
  const Lane* const from = reinterpret_cast<const Lane*>(data);
  const int64_t each = lines / kStreams;
  Lane sum[kStreams] = {};
  for (int64_t line = 0; line < each; ++line) {
    for (int64_t s = 0; s < kStreams; ++s) sum[s] += from[s * each + line];
  }
  volatile int64_t sink = (sum[0] + sum[1] + sum[2] + sum[3])[0];  // keeps the reads
  static_cast<void>(sink);
}

#if defined(__x86_64__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
void
rewrite_lines(char* data, int64_t lines, int64_t change) {
  typedef int64_t Lane __attribute__((vector_size(kLine)));
  Lane* const at = reinterpret_cast<Lane*>(data);
  for (int64_t line = 0; line < lines; ++line) at[line] ^= change;
}

// Rows of `lines` each, those of four parts of the list side by side, the next ones on their
// way; up to three are left out.
#if defined(__x86_64__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
void
read_listed(const char* data, int64_t lines, const int32_t* rows, int64_t count) {
  typedef int64_t Lane __attribute__((vector_size(kLine)));
  const int64_t each = count / kStreams;
  Lane sum[kStreams] = {};
  for (int64_t i = 0; i < each; ++i) {
    for (int64_t line = 0; line < lines; ++line) {
      for (int64_t s = 0; s < kStreams; ++s) {
        const int32_t* const row = rows + s * each + i;
        const Lane* const from = reinterpret_cast<const Lane*>(data + *row * lines * kLine);
        __builtin_prefetch(data + row[i + 1 < each] * lines * kLine + line * kLine);
        sum[s] += from[line];
      }
    }
  }
  volatile int64_t sink = (sum[0] + sum[1] + sum[2] + sum[3])[0];  // keeps the reads
  static_cast<void>(sink);
}

}  // namespace

void read_rows(const void* memory, int64_t row_bytes, const int32_t* rows, int64_t count,
               int threads) {
  const char* const data = static_cast<const char*>(memory);
  if (reinterpret_cast<uintptr_t>(data) % kLine || row_bytes % kLine) {
    throw std::invalid_argument("address, row_bytes: expected multiples of 64");
  }
  parallel(threads, threads, [&](int64_t t, int) {
    const int64_t first = count * t / threads;
    read_listed(data, row_bytes / kLine, rows + first, count * (t + 1) / threads - first);
  });
}

void read(const void* memory, int64_t bytes, int threads) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(memory);
  const char* const data = static_cast<const char*>(memory) + (kLine - address % kLine) % kLine;
  const int64_t lines = bytes / kLine - 1;  // the start was rounded up
  parallel(threads, threads, [&](int64_t t, int) {
    const int64_t first = lines * t / threads;
    read_lines(data + first * kLine, lines * (t + 1) / threads - first);
  });
}

void rewrite(void* memory, int64_t bytes, int threads) {
  char* const data = static_cast<char*>(memory);
  if (reinterpret_cast<uintptr_t>(data) % kLine || bytes % kLine) {
    throw std::invalid_argument("address, bytes: expected multiples of 64");
  }
  static volatile int64_t nothing = 0;  // read, so that no compiler knows it
  const int64_t lines = bytes / kLine, change = nothing;
  parallel(threads, threads, [&](int64_t t, int) {
    const int64_t first = lines * t / threads;
    rewrite_lines(data + first * kLine, lines * (t + 1) / threads - first, change);
  });
}

double read_bandwidth(int64_t bytes, int threads, int repeats) {
  const std::vector<char> memory(static_cast<size_t>(bytes), 1);
  double best = 0;
  for (int i = 0; i < repeats; ++i) {
    const auto start = std::chrono::steady_clock::now();
    read(memory.data(), bytes, threads);
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    best = std::max(best, static_cast<double>(bytes) / taken.count());
  }
  return best;
}

int64_t multiply_registers(Dtype type, int64_t rounds, int threads) {
  const auto multiply = chosen_kernels().multiply_registers[static_cast<int>(type)];
  std::atomic<int64_t> operations{0};
  parallel(threads, threads, [&](int64_t, int) { operations += multiply(rounds); });
  return operations;
}

}  // namespace specattn
