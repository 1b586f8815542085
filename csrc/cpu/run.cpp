#include "run.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "convert.h"
#include "kernels.h"
#include "team.h"
#include "tuned.h"

namespace specattn {
namespace {

// Linux keeps room for tiles in a thread's saved state only when a process asks for it.
bool may_use_tiles() {
#if defined(__linux__) && defined(__x86_64__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

#if defined(__x86_64__)
// A hypervisor may hide what the processor has: who forces this path says that it is there.
bool multiplies_fp16_tiles() {
  const char* const forced = std::getenv("SPECATTN_CPU_ISA");
  if (forced && std::strcmp(forced, "amx_fp16") == 0) return true;
  constexpr unsigned kAmxFp16 = 1u << 21;
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & kAmxFp16) != 0;
}
#endif

#if defined(__x86_64__)
// Of a path that has kernels of its own for some types: those, and AVX-512's beside them. Made
// here, where every processor may run what the compiler makes of it.
Kernels beside_avx512(const Kernels& own) {
  using Kernel = void (*)();
  static_assert(sizeof(Kernels) % sizeof(Kernel) == 0 && sizeof own.name == sizeof(Kernel));
  constexpr size_t kCount = sizeof(Kernels) / sizeof(Kernel);
  Kernel found[kCount], ours[kCount];
  std::memcpy(found, &avx512_kernels(), sizeof found);
  std::memcpy(ours, &own, sizeof ours);
  for (size_t i = 0; i < kCount; ++i) found[i] = ours[i] ? ours[i] : found[i];
  Kernels all;
  std::memcpy(&all, found, sizeof all);
  return all;
}

const Kernels& avx512_bf16() {
  static const Kernels all = beside_avx512(avx512_bf16_kernels());
  return all;
}
#endif

std::vector<const Kernels*> available() {
  std::vector<const Kernels*> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  const bool bf16 =
      avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
  if (bf16 && __builtin_cpu_supports("amx-bf16") && may_use_tiles()) {
    static const Kernels amx = beside_avx512(amx_kernels());
    static const Kernels amx_fp16 = beside_avx512(amx_fp16_kernels());
    if (multiplies_fp16_tiles()) found.push_back(&amx_fp16);
    found.push_back(&amx);
  }
  // There a pairwise product takes as long as four float ones, and does the work of two.
  const bool slow_pairs = __builtin_cpu_is("intel");
  if (bf16 && !slow_pairs) found.push_back(&avx512_bf16());
  if (avx512) found.push_back(&avx512_kernels());
  if (bf16 && slow_pairs) found.push_back(&avx512_bf16());
  if (avx2) found.push_back(&avx2_kernels());
#endif
  found.push_back(&generic_kernels());
  return found;
}

// The kernels of a code path as its values have them.
const Kernels* as_tuned(const Kernels* kernels) {
#if defined(__x86_64__)
  if (kernels->name != avx512_bf16().name) return kernels;
  static const Kernels wide = [] {
    Kernels all = avx512_bf16();
    all.attend[static_cast<int>(Dtype::kFloat32)] = wide_attend().of_float32;
    all.attend[static_cast<int>(Dtype::kBFloat16)] = wide_attend().of_bfloat16;
    return all;
  }();
  return tuning.wide ? &wide : &avx512_bf16();
#else
  return kernels;
#endif
}

const Kernels* with_values_of_machine(const Kernels* kernels) {
  tuning = tuning_of(machine_of(kernels->name), kTuned);
  return as_tuned(kernels);
}

const Kernels*& chosen() {
  static const Kernels* kernels = with_values_of_machine(available().front());
  return kernels;
}

}  // namespace

const Kernels& chosen_kernels() { return *chosen(); }

int useful_threads(int64_t work, int64_t tasks, int threads) {
  return static_cast<int>(
      std::clamp<int64_t>(std::min(work / tuning.thread_work, tasks), 1, threads));
}

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (const Kernels* kernels : available()) names.push_back(kernels->name);
  return names;
}

std::string isa() { return chosen()->name; }

void use_isa(const std::string& name) {
  std::string known;
  for (const Kernels* kernels : available()) {
    if (name == kernels->name) {
      chosen() = with_values_of_machine(kernels);
      return;
    }
    known += std::string(known.empty() ? "" : ", ") + kernels->name;
  }
  throw std::invalid_argument("no CPU path \"" + name + "\" on this machine; it has: " + known);
}

void tune(const std::string& values) {
  const Kernels*& kernels = chosen();
  set(tuning, values);
  kernels = as_tuned(kernels);
}

void run(const Importance& p, int threads) {
  static thread_local Arena arena;
  const int64_t mean = p.Hk * p.D;
  float* const queries = arena.floats(p.B * mean);
  const int64_t chunks = ceil_div(p.capacity, kImportanceChunk);
  const int64_t work = p.B * p.capacity * p.Hk * p.D * (p.cache.size + 1);
  threads = useful_threads(work, p.B * chunks, threads);
  const int type = static_cast<int>(p.dtype);
  const Kernels& kernels = *chosen();
  parallel(threads, p.B * p.Hk, [&](int64_t i, int) {
    kernels.mean_query[type](p, i / p.Hk, i % p.Hk, queries + i * p.D);
  });
  parallel(threads, p.B * chunks, [&](int64_t i, int) {
    const int64_t b = i / chunks, first = i % chunks * kImportanceChunk;
    const int64_t last = std::min(first + kImportanceChunk, p.capacity);
    kernels.importance[static_cast<int>(p.cache.type)](p, b, first, last, queries + b * mean);
  });
}

void run(const Merge& p, int threads) {
  const int64_t tokens = p.B * p.T;
  const int64_t work = tokens * p.H * p.D * (p.states + 1) * size_of(p.dtype);
  threads = useful_threads(work, tokens, threads);
  const int64_t parts = std::min<int64_t>(tokens, threads * kTasksPerThread);
  const auto merge = chosen()->merge[static_cast<int>(p.dtype)];
  parallel(threads, parts,
           [&](int64_t i, int) { merge(p, tokens * i / parts, tokens * (i + 1) / parts); });
}

template <class Row>
void for_rows(int64_t rows, int64_t work, int threads, const Row& row) {
  threads = useful_threads(work, rows, threads);
  parallel(threads, rows, [&](int64_t i, int) { row(i); });
}

void run(const Embed& p, int threads) {
  const int64_t bytes = p.H * size_of(p.dtype);
  for_rows(p.B * p.T, p.B * p.T * bytes, threads, [&](int64_t i) {
    const int64_t size = size_of(p.dtype);
    std::memcpy(static_cast<char*>(p.out) + i * p.out_row * size,
                static_cast<const char*>(p.weight) + p.token(i) * p.weight_row * size,
                static_cast<size_t>(bytes));
  });
}

void run(const RmsNorm& p, int threads) {
  const auto norm = chosen()->rms_norm[static_cast<int>(p.dtype)];
  for_rows(p.M, 4 * p.M * p.H, threads, [&](int64_t i) { norm(p, i); });
}

void run(const Gate& p, int threads) {
  const auto gate = chosen()->gate[static_cast<int>(p.dtype)];
  for_rows(p.M, 8 * p.M * p.N, threads, [&](int64_t i) { gate(p, i); });
}

void run(const Dequantise& p, int threads) {
  const int codes = kernel_of(p.codes), type = static_cast<int>(p.dtype);
  const auto some =
      p.tiles ? chosen()->dequantise_tile[codes][type] : chosen()->dequantise[codes][type];
  const int64_t count = p.tiles ? p.weights.rows / kTileOutputs : p.weights.rows;
  for_rows(count, 8 * p.weights.rows * p.K, threads, [&](int64_t i) { some(p, i); });
}

void run(const RotateHeads& p, int threads) {
  const auto rotate = chosen()->rotate_heads[static_cast<int>(p.dtype)];
  const int64_t work = 4 * p.B * p.T * (p.Hq + 2 * p.Hk) * p.D;
  for_rows(p.B * p.T, work, threads, [&](int64_t i) { rotate(p, i / p.T, i % p.T); });
}

void run(const BestChildren& p, int threads) {
  const auto best = chosen()->best_children[static_cast<int>(p.dtype)];
  for_rows(p.B, 8 * p.B * p.nodes * p.vocabulary, threads, [&](int64_t b) { best(p, b); });
}

void run(const GumbelNoise& p, int threads) {
  const auto add = chosen()->add_gumbel_noise[static_cast<int>(p.dtype)];
  const int64_t groups = ceil_div(p.vocabulary, kNoiseGroup);
  for_rows(p.n * groups, 16 * p.n * p.vocabulary, threads,
           [&](int64_t i) { add(p, i / groups, i % groups * kNoiseGroup); });
}

}  // namespace specattn
