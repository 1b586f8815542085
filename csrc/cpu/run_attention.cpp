// Cuts an attention call into tasks and their splits, and runs those on threads.
#include <algorithm>
#include <atomic>
#include <vector>

#include "convert.h"
#include "kernels.h"
#include "ragged.h"
#include "run.h"
#include "team.h"

namespace specattn {
namespace {

constexpr int64_t kBlocksPerSplit = 8;     // at least; a split costs a state and a merge
constexpr int64_t kUsualHeadDim = 256;     // at most
constexpr int64_t kStateFloats = 1 << 16;  // of the heads of a task together: they stay in L2

int64_t tasks_of(const Attention& a, const Plan& plan) {
  return a.B * ceil_div(a.Hk, plan.heads_per_task) * plan.row_groups;
}

// Follows the static shape; the longest request only says how many splits can be of use. How many
// a request has follows from its own length, so its bits do not depend on its neighbours.
Plan make_plan(const Attention& a, int threads) {
  Plan plan;
  const int64_t g = a.group();
  // Wide heads have fewer rows, whose queries and state take as much memory.
  const int64_t most = kGroupRows * kUsualHeadDim / std::max<int64_t>(a.D, kUsualHeadDim);
  plan.rows_per_group = std::max<int64_t>(1, std::min(a.T, most / g));
  plan.row_groups = ceil_div(a.T, plan.rows_per_group);
  plan.rows = round_up(plan.rows_per_group * g, kRowPadding);
  plan.stride = round_up(a.D, kColumnPadding);
  plan.v_stride = round_up(a.Dv, kColumnPadding);
  plan.adds = a.collect == Collect::kScores && (plan.row_groups > 1 || !a.per_head);
  const bool per_head = a.cache.indices_head != 0 || a.cache.lengths_head != 0;
  const int64_t fit = kStateFloats / (plan.rows * plan.v_stride);
  plan.heads_per_task = per_head ? 1 : std::clamp<int64_t>(fit, 1, a.Hk);
  const int64_t tasks = tasks_of(a, plan);
  int64_t longest = 0;
  for (int64_t b = 0; b < a.B; ++b) {
    for (int64_t h = 0; h < (a.cache.lengths_head ? a.Hk : 1); ++h) {
      longest = std::max(longest, a.length(b, h));
    }
  }
  const int64_t blocks = ceil_div(longest + a.tree.size, kBlock);
  const int64_t wanted = threads > 1 && tasks > 0 ? ceil_div(kTasksPerThread * threads, tasks) : 1;
  plan.splits = std::clamp<int64_t>(blocks / kBlocksPerSplit, 1, wanted);
  return plan;
}

int64_t work_of(const Attention& a) {
  int64_t keys = 0;
  for (int64_t b = 0; b < a.B; ++b) keys += a.length(b, 0) + a.tree.size;
  return keys * (a.D + a.Dv) / 2 * (2 * a.Hk * a.cache.size + a.T * a.Hq);
}

// How many tasks and splits there would be if each had one head.
int64_t tasks_of_heads(const Attention& a, const Plan& plan) {
  return a.B * a.Hk * plan.row_groups * plan.splits;
}

// Where splits are few, heads are shared out instead: which thread has a head changes no bit. Where
// a head's tokens lie together, a task of several would jump between heads. Heads that add to the
// same scores stay together, for they would take turns.
void spread_heads(const Attention& a, Plan& plan, int64_t all_tasks, int threads) {
  if (!a.per_head) return;
  const bool heads_outside = a.cache.k.head > a.cache.k.token;
  const int64_t most = heads_outside ? 1 : threads > 1 ? all_tasks / (2 * threads) : a.Hk;
  plan.heads_per_task = std::clamp<int64_t>(most, 1, plan.heads_per_task);
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

// What of a call is cut alike: all requests of uniform queries, or one of ragged ones. A request is
// then cut as it is alone, so its bits do not depend on its neighbours.
struct Part {
  const Attention* a;
  Plan plan;
  int64_t work, most_tasks;
  int64_t groups = 0;  // tasks, all splits of each together
  int64_t rounds = 1;  // row groups, and heads that share scores, take turns in a fixed order
  int64_t state = 0;   // floats of a task
  int64_t states = 0;  // where those of all splits begin
  int64_t counts = 0;  // where the counts of its tasks begin
  int64_t run = 1;     // splits that a thread does one after the other

  Part(const Attention& a, int threads)
      : a(&a), plan(make_plan(a, threads)), work(work_of(a)), most_tasks(tasks_of_heads(a, plan)) {}

  int64_t work_of_piece() const { return work / std::max<int64_t>(most_tasks, 1); }
  bool split() const { return plan.splits > 1; }
  int64_t runs() const { return ceil_div(plan.splits, run); }
  int64_t q_floats() const { return plan.heads_per_task * plan.rows * plan.stride; }

  // Once it is known how many tasks there are in all.
  void lay_out(int64_t all_tasks, int threads, int64_t& floats, int64_t& split_tasks) {
    spread_heads(*a, plan, all_tasks, threads);
    groups = tasks_of(*a, plan);
    const int64_t sharing = a->per_head ? 1 : ceil_div(a->Hk, plan.heads_per_task);
    rounds = plan.adds ? plan.row_groups * sharing : 1;
    state = round_up(plan.heads_per_task * State::floats(plan.rows, plan.v_stride), 16);
    states = floats, counts = split_tasks;
    if (split()) floats += groups * plan.splits * state, split_tasks += groups;
  }
};

// The parts of a call; the memory is kept for the next one.
class Parts {
 public:
  void set(const Attention& a, int threads) {
    parts_.clear();
    if (!a.q_starts && !a.cache.per_row) {
      parts_.emplace_back(a, threads);
    } else {
      for (const Attention& one : requests_.of(a)) parts_.emplace_back(one, threads);
      // Long pieces come first: short ones then fill the gaps at the end.
      std::sort(parts_.begin(), parts_.end(),
                [](const Part& x, const Part& y) { return x.work_of_piece() > y.work_of_piece(); });
    }
    ends_.resize(parts_.size());
  }

  std::vector<Part>::iterator begin() { return parts_.begin(); }
  std::vector<Part>::iterator end() { return parts_.end(); }

  // Makes room for the counts of tasks; between calls all are zero.
  void expect(int64_t split_tasks) {
    const size_t count = static_cast<size_t>(split_tasks);
    if (done_.size() < count) done_ = std::vector<std::atomic<int64_t>>(count);
  }

  // Counts splits that are done; true for the last ones of a task.
  bool last(const Part& part, int64_t group, int64_t splits) {
    std::atomic<int64_t>& done = done_[static_cast<size_t>(part.counts + group)];
    if (done.fetch_add(splits) + splits < part.plan.splits) return false;
    done = 0;
    return true;
  }

  // Splits that a thread does in a row need not start cold, so they go apart only as far as that
  // keeps the threads busy.
  void set_runs(int threads) {
    int64_t splits = 0;
    for (const Part& part : parts_) splits += part.groups * part.plan.splits;
    const int64_t most = splits / (kTasksPerThread * threads);
    for (Part& part : parts_) part.run = std::clamp<int64_t>(most, 1, part.plan.splits);
  }

  // Calls first(piece) for `before` pieces, then work(part, piece, worker) for the pieces of each
  // part, of which there are count(part).
  template <class First, class Count, class Work>
  void share(int threads, int64_t before, const First& first, const Count& count,
             const Work& work) {
    int64_t pieces = before;
    for (size_t i = 0; i < parts_.size(); ++i) ends_[i] = pieces += count(parts_[i]);
    parallel(threads, pieces, [&](int64_t piece, int worker) {
      if (piece < before) return first(piece);
      const auto end = std::upper_bound(ends_.begin(), ends_.end(), piece);
      const int64_t begin = end == ends_.begin() ? before : end[-1];
      work(parts_[static_cast<size_t>(end - ends_.begin())], piece - begin, worker);
    });
  }

 private:
  Requests requests_;
  std::vector<Part> parts_;
  std::vector<int64_t> ends_;
  std::vector<std::atomic<int64_t>> done_;
};

}  // namespace

void run(const Attention& a, int threads) {
  static thread_local Arena arena;
  static thread_local Parts kept;
  Parts& parts = kept;  // those of this thread, whoever does a piece
  const Kernels& kernels = chosen_kernels();
  const int type = static_cast<int>(a.dtype);
  parts.set(a, threads);
  int64_t work = 0, most_tasks = 0;
  for (const Part& part : parts) work += part.work, most_tasks += part.most_tasks;
  threads = useful_threads(work, most_tasks, threads);
  int64_t state_floats = 0, split_tasks = 0, q_floats = 0, own_state = 0, rounds = 1;
  bool adds = false;
  for (Part& part : parts) {
    part.lay_out(most_tasks, threads, state_floats, split_tasks);
    q_floats = std::max(q_floats, part.q_floats());
    if (!part.split()) own_state = std::max(own_state, part.state);
    rounds = std::max(rounds, part.rounds);
    adds = adds || part.plan.adds;
  }
  parts.expect(split_tasks);
  parts.set_runs(threads);
  const int64_t scratch = Scratch::floats(q_floats, own_state, of_8_bits(a.cache.type));
  float* const memory = arena.floats(threads * scratch + state_floats);
  float* const states = memory + threads * scratch;

  const auto attend = [&](const Part& part, int64_t index, int worker) {
    const Plan& plan = part.plan;
    const int64_t group = index / part.runs(), first = index % part.runs() * part.run;
    const int64_t last = std::min(first + part.run, plan.splits);
    Task task = task_of(*part.a, plan, group);
    const int64_t blocks = KeyRange(*part.a, task.b, task.head, task.rows).blocks;
    const int64_t splits = std::clamp<int64_t>(blocks / kBlocksPerSplit, 1, plan.splits);
    const auto block_of = [&](int64_t split) { return blocks * std::min(split, splits) / splits; };
    const Scratch mine(memory + worker * scratch, q_floats, own_state);
    float* const to =
        part.split() ? states + part.states + group * plan.splits * part.state : mine.state;
    task.ahead_block = block_of(last);
    for (int64_t split = first; split < last; ++split) {
      task.first_block = block_of(split), task.last_block = block_of(split + 1);
      kernels.attend[type](*part.a, plan, task, to + split * part.state, mine);
    }
    if (part.split() && !parts.last(part, group, last - first)) return;
    kernels.finish[type](*part.a, plan, task, to, part.state);
  };
  const int64_t collected_heads = a.per_head ? a.Hk : 1;
  int64_t before = a.collect == Collect::kNone ? 0 : a.B * collected_heads;
  const auto start = [&](int64_t i) {
    const Part& part = parts.begin()[i / collected_heads / parts.begin()->a->B];
    start_collecting(*part.a, part.plan, i / collected_heads % part.a->B, i % collected_heads);
  };
  // Without a window tasks and this write apart from each other, unless they add.
  if (adds || a.window) {
    parallel(threads, before, [&](int64_t i, int) { start(i); });
    before = 0;
  }
  for (int64_t round = 0; round < rounds; ++round) {
    const auto count = [round](const Part& part) {
      return round < part.rounds ? part.groups / part.rounds * part.runs() : 0;
    };
    parts.share(threads, before, start, count, [&](const Part& part, int64_t i, int worker) {
      const int64_t runs = part.runs();
      attend(part, (i / runs * part.rounds + round) * runs + i % runs, worker);
    });
    before = 0;
  }
}

}  // namespace specattn
