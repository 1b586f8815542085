#include "run.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>

#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "convert.h"
#include "kernels.h"
#include "team.h"

namespace specattn {
namespace {

constexpr int64_t kTasksPerThread = 4;     // so that a thread that was interrupted costs little
constexpr int64_t kBlocksPerSplit = 8;     // at least; a split costs a state and a merge
constexpr int64_t kStateFloats = 1 << 16;  // of the heads of a task together: they stay in L2
constexpr int64_t kThreadWork = 1 << 18;   // bytes and multiplications: 0.01 ms of one thread

int64_t size_of(Dtype type) { return type == Dtype::kFloat32 ? 4 : 2; }

// Linux keeps room for tiles in a thread's saved state only when a process asks for it.
bool may_use_tiles() {
#if defined(__linux__) && defined(__x86_64__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

std::vector<const Kernels*> available() {
  std::vector<const Kernels*> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  if (bf16 && __builtin_cpu_supports("amx-bf16") && may_use_tiles()) {
    found.push_back(&amx_kernels());
  }
  // There a pairwise product takes as long as four float ones, and does the work of two.
  const bool slow_pairs = __builtin_cpu_is("intel");
  if (bf16 && !slow_pairs) found.push_back(&avx512_bf16_kernels());
  if (avx512) found.push_back(&avx512_kernels());
  if (bf16 && slow_pairs) found.push_back(&avx512_bf16_kernels());
  if (avx2) found.push_back(&avx2_kernels());
#endif
  found.push_back(&generic_kernels());
  return found;
}

const Kernels*& chosen() {
  static const Kernels* kernels = available().front();
  return kernels;
}

int64_t tasks_of(const Attention& a, const Plan& plan) {
  return a.B * ceil_div(a.Hk, plan.heads_per_task) * plan.row_groups;
}

// Follows the static shape; the longest request only says how many splits can be of use. How many
// a request has follows from its own length, so its bits do not depend on its neighbours.
Plan make_plan(const Attention& a, int threads) {
  Plan plan;
  const int64_t g = a.group();
  plan.rows_per_group = std::min(a.T, std::max<int64_t>(1, kGroupRows / g));
  plan.row_groups = ceil_div(a.T, plan.rows_per_group);
  plan.rows = round_up(plan.rows_per_group * g, kRowPadding);
  plan.stride = round_up(a.D, kColumnPadding);
  plan.adds = a.collect == Collect::kScores && (plan.row_groups > 1 || !a.per_head);
  const bool per_head = a.cache.indices_head != 0 || a.cache.lengths_head != 0;
  const int64_t fit = kStateFloats / (plan.rows * plan.stride);
  plan.heads_per_task = per_head ? 1 : std::clamp<int64_t>(fit, 1, a.Hk);
  const int64_t tasks = tasks_of(a, plan);
  int64_t longest = 0;
  for (int64_t b = 0; b < a.B; ++b) {
    for (int64_t h = 0; h < (a.cache.lengths_head ? a.Hk : 1); ++h) {
      longest = std::max(longest, a.length(b, h));
    }
  }
  const int64_t blocks = ceil_div(longest + a.tree.size, kBlock);
  const int64_t wanted = threads > 1 ? ceil_div(kTasksPerThread * threads, tasks) : 1;
  plan.splits = std::clamp<int64_t>(blocks / kBlocksPerSplit, 1, wanted);
  return plan;
}

int64_t work_of(const Attention& a) {
  int64_t keys = 0;
  for (int64_t b = 0; b < a.B; ++b) keys += a.length(b, 0) + a.tree.size;
  return keys * a.D * (2 * a.Hk * size_of(a.dtype) + a.T * a.Hq);
}

// Where splits are few, heads are shared out instead: which thread has a head changes no bit. Heads
// that add to the same scores stay together, for they would take turns.
void spread_heads(const Attention& a, Plan& plan, int threads) {
  if (!a.per_head) return;
  const int64_t most = a.B * plan.row_groups * plan.splits * a.Hk / (2 * threads);
  if (threads > 1) plan.heads_per_task = std::clamp<int64_t>(most, 1, plan.heads_per_task);
}

Task task_of(const Attention& a, const Plan& plan, int64_t index) {
  Task task;
  const int64_t head_groups = ceil_div(a.Hk, plan.heads_per_task);
  // The last rows of a causal chunk see most keys: they come first.
  const int64_t group = plan.row_groups - 1 - index % plan.row_groups;
  task.head = index / plan.row_groups % head_groups * plan.heads_per_task;
  task.heads = std::min(plan.heads_per_task, a.Hk - task.head);
  task.b = index / plan.row_groups / head_groups;
  task.rows.first = group * plan.rows_per_group;
  task.rows.count = std::min(plan.rows_per_group, a.T - task.rows.first);
  return task;
}

// Hidden keys are -inf. Scores that several tasks add to start at zero.
void start_collecting(const Attention& a, const Plan& plan, int64_t b, int64_t head) {
  const int64_t length = a.length(b, head), g = a.group(), N = a.capacity;
  if (a.collect == Collect::kScores) {
    const int64_t start = collect_start(a, b, length);
    float* to = static_cast<float*>(a.collected) + b * a.collected_batch + head * a.collected_head;
    std::fill(to, to + start, -kInf);
    if (plan.adds) std::fill(to + start, to + length, 0.0f);
    std::fill(to + length, to + N, -kInf);
    return;
  }
  const bf16 hidden = from_float<bf16>(-kInf);
  for (int64_t i = 0; i < a.num_collect; ++i) {
    const int64_t start = window_start(a, b, length, a.collect_rows[i]);
    for (int64_t h = head * g; h < (head + 1) * g; ++h) {
      bf16* to = static_cast<bf16*>(a.collected) + b * a.collected_batch + i * a.collected_row +
                 h * a.collected_head;
      std::fill(to, to + start, hidden);
      std::fill(to + length, to + N, hidden);
    }
  }
}

}  // namespace

const Kernels& chosen_kernels() { return *chosen(); }

int useful_threads(int64_t work, int64_t tasks, int threads) {
  return static_cast<int>(std::clamp<int64_t>(std::min(work / kThreadWork, tasks), 1, threads));
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
      chosen() = kernels;
      return;
    }
    known += std::string(known.empty() ? "" : ", ") + kernels->name;
  }
  throw std::invalid_argument("no CPU path \"" + name + "\" on this machine; it has: " + known);
}

void run(const Attention& a, int threads) {
  static thread_local Arena arena;
  const Kernels& kernels = *chosen();
  const int type = static_cast<int>(a.dtype);
  Plan plan = make_plan(a, threads);
  const int64_t most_tasks = a.B * a.Hk * plan.row_groups * plan.splits;
  threads = useful_threads(work_of(a), most_tasks, threads);
  spread_heads(a, plan, threads);
  const int64_t groups = tasks_of(a, plan);
  const int64_t state = round_up(plan.heads_per_task * State::floats(plan.rows, plan.stride), 16);
  const int64_t q_floats = plan.heads_per_task * plan.rows * plan.stride;
  const bool split = plan.splits > 1;
  const int64_t scratch = Scratch::floats(q_floats, split ? 0 : state);
  float* const memory =
      arena.floats(threads * scratch + (split ? groups * plan.splits * state : 0));
  float* const states = memory + threads * scratch;

  const auto attend = [&](int64_t index, int worker) {
    Task task = task_of(a, plan, index / plan.splits);
    const int64_t part = index % plan.splits;
    const int64_t blocks = KeyRange(a, task.b, task.head, task.rows).blocks;
    const int64_t parts = std::clamp<int64_t>(blocks / kBlocksPerSplit, 1, plan.splits);
    task.first_block = blocks * std::min(part, parts) / parts;
    task.last_block = blocks * std::min(part + 1, parts) / parts;
    const Scratch mine(memory + worker * scratch, q_floats);
    float* to = split ? states + index * state : mine.state;
    kernels.attend[type](a, plan, task, to, mine);
    if (!split) kernels.finish[type](a, plan, task, to, 0);
  };
  // Row groups, and heads that share scores, take turns in a fixed order.
  const int64_t sharing = a.per_head ? 1 : ceil_div(a.Hk, plan.heads_per_task);
  const int64_t rounds = plan.adds ? plan.row_groups * sharing : 1;
  const int64_t collected_heads = a.per_head ? a.Hk : 1;
  int64_t before = a.collect == Collect::kNone ? 0 : a.B * collected_heads;
  const auto start = [&](int64_t i, int) {
    start_collecting(a, plan, i / collected_heads, i % collected_heads);
  };
  // Without a window tasks and this write apart from each other, unless they add.
  if (plan.adds || a.window) {
    parallel(threads, before, start);
    before = 0;
  }
  for (int64_t round = 0; round < rounds; ++round) {
    parallel(threads, before + groups / rounds * plan.splits, [&](int64_t piece, int worker) {
      if (piece < before) return start(piece, worker);
      const int64_t i = piece - before;
      attend((i / plan.splits * rounds + round) * plan.splits + i % plan.splits, worker);
    });
  }
  if (split) {
    parallel(threads, groups, [&](int64_t i, int) {
      kernels.finish[type](a, plan, task_of(a, plan, i), states + i * plan.splits * state, state);
    });
  }
}

void run(const Importance& p, int threads) {
  static thread_local Arena arena;
  const int64_t mean = p.Hk * p.D;
  float* const queries = arena.floats(p.B * mean);
  const int64_t chunks = ceil_div(p.capacity, kImportanceChunk);
  const int64_t work = p.B * p.capacity * p.Hk * p.D * (size_of(p.dtype) + 1);
  threads = useful_threads(work, p.B * chunks, threads);
  const int type = static_cast<int>(p.dtype);
  const Kernels& kernels = *chosen();
  parallel(threads, p.B * p.Hk, [&](int64_t i, int) {
    kernels.mean_query[type](p, i / p.Hk, i % p.Hk, queries + i * p.D);
  });
  parallel(threads, p.B * chunks, [&](int64_t i, int) {
    const int64_t b = i / chunks, first = i % chunks * kImportanceChunk;
    const int64_t last = std::min(first + kImportanceChunk, p.capacity);
    kernels.importance[type](p, b, first, last, queries + b * mean);
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
