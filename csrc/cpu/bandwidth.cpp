// What the memory gives: the ceiling that kernels are measured against.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

#include "run.h"
#include "types.h"

namespace specattn {

double read_bandwidth(int64_t bytes, int threads, int repeats) {
  typedef int64_t Lane __attribute__((vector_size(64)));
  const int64_t lines = std::max<int64_t>(bytes / 64, 1);
  std::vector<int64_t> memory(static_cast<size_t>(lines) * 8 + 8, 1);
  const char* data = reinterpret_cast<const char*>(
      round_up(static_cast<int64_t>(reinterpret_cast<uintptr_t>(memory.data())), 64));
  double best = 0;
  volatile int64_t sink = 0;  // keeps the reads
  static_cast<void>(sink);
  for (int i = 0; i < repeats; ++i) {
    const auto start = std::chrono::steady_clock::now();
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int t = 0; t < threads; ++t) {
      Lane sum[4] = {};
      const int64_t last = lines * (t + 1) / threads;
      for (int64_t line = lines * t / threads; line + 4 <= last; line += 4) {
        __builtin_prefetch(data + (line + 64) * 64, 0, 0);
        __builtin_prefetch(data + (line + 65) * 64, 0, 0);
        __builtin_prefetch(data + (line + 66) * 64, 0, 0);
        __builtin_prefetch(data + (line + 67) * 64, 0, 0);
        for (int j = 0; j < 4; ++j)
          sum[j] += *reinterpret_cast<const Lane*>(data + (line + j) * 64);
      }
      sink = (sum[0] + sum[1] + sum[2] + sum[3])[0];
    }
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    best = std::max(best, static_cast<double>(lines) * 64 / taken.count());
  }
  return best;
}

}  // namespace specattn
