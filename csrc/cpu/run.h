// Cuts a call into tasks and runs them on threads.
#pragma once

#include <string>
#include <vector>

#include "problem.h"

namespace specattn {

void run(const Attention&, int threads);
void run(const Importance&, int threads);
void run(const Merge&, int threads);
void run(const WriteKV&, int threads);
void run(const Embed&, int threads);
void run(const RmsNorm&, int threads);
void run(const RotateHeads&, int threads);
void run(const BestChildren&, int threads);
void run(const GumbelNoise&, int threads);

constexpr int64_t kTasksPerThread = 4;  // so that a thread that was interrupted costs little

// How many threads `work` (bytes and multiplications) in `tasks` parts is worth. Waking a thread
// that sleeps takes the caller 0.01 ms, and the thread comes later still.
int useful_threads(int64_t work, int64_t tasks, int threads);

// Code paths that this processor has, best first; the first is used unless another is forced.
std::vector<std::string> isas();
std::string isa();
void use_isa(const std::string& name);  // throws std::invalid_argument
// Changes values of the code path in use (tuning.h), until another is chosen.
void tune(const std::string& values);  // throws std::invalid_argument

// Reads every whole cache line of `memory` once, and does nothing with it.
void read(const void* memory, int64_t bytes, int threads);
// Reads whole cache lines once and writes them back as they were.
void rewrite(void* memory, int64_t bytes, int threads);
// Reads the listed rows once, which are whole cache lines.
void read_rows(const void* memory, int64_t row_bytes, const int32_t* rows, int64_t count,
               int threads);
// Bytes per second of the best of some such reads of fresh memory.
double read_bandwidth(int64_t bytes, int threads, int repeats);

// Multiplies numbers of a type that lie in registers, as the code path in use does; returns the
// operations of all threads.
int64_t multiply_registers(Dtype type, int64_t rounds, int threads);

struct TopK {
  int64_t rows_outer = 0, rows_inner = 0, capacity = 0;  // [outer, inner, N]; lengths [outer]
  const float* scores = nullptr;
  int64_t scores_outer = 0, scores_inner = 0;
  const int32_t* lengths = nullptr;
  int64_t lengths_stride = 0;
  double ratio = -1;  // used when not negative
  int64_t budget = 0, min_tokens = 0, keep_first = 0, keep_last = 0;
  int64_t width = 0;  // columns of indices
  int32_t* indices = nullptr;
  int64_t indices_outer = 0, indices_inner = 0;
  int32_t* counts = nullptr;
  int64_t counts_outer = 0, counts_inner = 0;
};

void run(const TopK&, int threads);

}  // namespace specattn
