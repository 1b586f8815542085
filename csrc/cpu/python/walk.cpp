// Walks down drafted trees along the target's own draws, on the host: specattn/acceptance.py has
// the same walk over tensors. And copies rows of the nodes that were accepted.
#include <cstring>
#include <limits>

#include "../check.h"
#include "../ranked.h"
#include "../run.h"
#include "binder.h"
#include "module.h"
#include "values.h"

namespace specattn {
namespace {

using Integers = std::vector<int64_t>;

// What one request draws its tokens from: logits [T, V] of its tree's nodes.
struct Draws {
  const void* logits;
  int64_t node_stride, vocabulary;
  Dtype dtype;
  float temperature;
  int64_t top_k;         // of which tokens one is drawn; 0: of all
  const uint64_t* seed;  // null: greedily
  int64_t request, position;
  int threads;
};

struct Room {
  std::vector<float> scores, best;
};

// Leaves the k largest scores, and what equals the last of them; false if one is NaN.
bool keep_largest(float* scores, int64_t count, int64_t k, std::vector<float>& room) {
  bool nan = false;
  for (int64_t i = 0; i < count; ++i) nan |= scores[i] != scores[i];
  if (nan) return false;
  const float least = kth_largest(scores, count, k, room);
  constexpr float kNever = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < count; ++i) scores[i] = scores[i] < least ? kNever : scores[i];
  return true;
}

// Draws the token after a node: -1 if none can follow.
template <class Elem>
int64_t draw(const Draws& draws, int64_t node, int64_t steps, Room& room) {
  const Elem* logits = static_cast<const Elem*>(draws.logits) + node * draws.node_stride;
  const int64_t count = draws.vocabulary;
  const bool filters = draws.top_k > 0 && draws.top_k < count;
  room.scores.resize(static_cast<size_t>(count));
  float* scores = room.scores.data();
  GumbelNoise noise = {};
  noise.logits = logits, noise.dtype = draws.dtype;
  if (draws.temperature != 1.0f || filters) {
    for (int64_t i = 0; i < count; ++i) scores[i] = to_float(logits[i]) / draws.temperature;
    noise.logits = scores, noise.dtype = Dtype::kFloat32;
  }
  if (filters && !keep_largest(scores, count, draws.top_k, room.best)) return -1;
  if (!draws.seed) {
    return noise.logits == logits ? first_largest(logits, count) : first_largest(scores, count);
  }
  const int64_t position = draws.position + steps;
  noise.n = 1, noise.vocabulary = count, noise.out = scores, noise.seed = *draws.seed;
  noise.requests = &draws.request, noise.positions = &position;
  run(noise, draws.threads);
  return first_largest(scores, count);
}

// One request's walk. `emitted` are the accepted tokens and the next one, each of which
// `token_after` draws, given a node and what was emitted; returns the last node.
template <class TokenAfter>
int64_t walk(const Integers& parents, const int64_t* tokens, const TokenAfter& token_after,
             Integers& emitted) {
  const auto size = static_cast<int64_t>(parents.size());
  std::vector<char> reached(parents.size()), below(parents.size());
  reached[0] = 1;
  for (int64_t node = 0;;) {
    emitted.push_back(token_after(node, emitted));
    int64_t next = -1;
    for (int64_t n = size - 1; n >= 0; --n) {
      const int64_t parent = parents[static_cast<size_t>(n)];
      below[static_cast<size_t>(n)] =
          parent >= 0 && reached[static_cast<size_t>(parent)] && tokens[n] == emitted.back();
      if (below[static_cast<size_t>(n)]) next = n;
    }
    if (next < 0) return node;
    node = next;
    reached.swap(below);
  }
}

void check_parents(const std::vector<Integers>& parents, size_t count, int64_t size) {
  if (parents.size() != 1 && parents.size() != count) {
    throw std::invalid_argument("parents must be of one tree, or of one for each request");
  }
  for (const Integers& tree : parents) {
    if (static_cast<int64_t>(tree.size()) != size || size == 0 || tree[0] != -1) {
      throw std::invalid_argument("parents must have as many nodes as tokens, the root's -1 first");
    }
    for (size_t n = 1; n < tree.size(); ++n) {
      check_index("parents", tree[n], -1, static_cast<int64_t>(n) - 1);
    }
  }
}

// Walks down every request's tree; `token_after` draws for a request, as for `walk`.
template <class TokenAfter>
std::vector<Integers> walk_each(const std::vector<Integers>& parents, const View& tokens,
                                const View& report, const TokenAfter& token_after) {
  tokens.expect(Dtype::kInt64, {-1, -1});
  const auto count = static_cast<size_t>(tokens.shape[0]);
  check_parents(parents, count, tokens.shape[1]);
  report.expect(Dtype::kInt64, {tokens.shape[0], -1});
  std::vector<Integers> emitted(count);
  for (size_t b = 0; b < count; ++b) {
    const auto row = static_cast<int64_t>(b);
    const Integers& tree = parents[parents.size() == 1 ? 0 : b];
    const auto after = [&](int64_t node, const Integers& path) {
      return token_after(row, node, path);
    };
    int64_t node = walk(tree, tokens.as<int64_t>() + row * tokens.stride[0], after, emitted[b]);
    const auto accepted = static_cast<int64_t>(emitted[b].size()) - 1;
    int64_t* out = report.as<int64_t>() + row * report.stride[0];
    if (report.shape[1] < 2 + accepted) report.fail("has too few columns for the trees' depth");
    std::fill(out, out + report.shape[1], -1);
    out[0] = accepted, out[1] = emitted[b].back();
    for (int64_t level = accepted; level > 0; --level) {
      out[1 + level] = node;
      node = tree[static_cast<size_t>(node)];
    }
  }
  return emitted;
}

std::vector<Integers> walk_trees(PyObject* given_logits, const std::vector<Integers>& parents,
                                 PyObject* given_tokens, const std::vector<float>& temperatures,
                                 const Integers& top_k, std::optional<uint64_t> seed,
                                 const Integers& requests, const Integers& positions,
                                 PyObject* given_report, int threads) {
  const View logits = view("logits", given_logits), tokens = view("tokens", given_tokens);
  const View report = view("report", given_report);
  if (logits.dims != 3 || logits.dtype > Dtype::kFloat16) {
    logits.fail("must have 3 dimensions and be float32, bfloat16 or float16");
  }
  tokens.expect(Dtype::kInt64, {logits.shape[0], logits.shape[1]});
  const auto count = static_cast<size_t>(logits.shape[0]);
  if (temperatures.size() != count || top_k.size() != count || requests.size() != count ||
      positions.size() != count) {
    logits.fail(
        "must be of as many requests as there are temperatures, top_k, requests and positions");
  }
  const auto draw_one = logits.dtype == Dtype::kFloat32    ? draw<float>
                        : logits.dtype == Dtype::kBFloat16 ? draw<bf16>
                                                           : draw<fp16>;
  const int64_t bytes = logits.dtype == Dtype::kFloat32 ? 4 : 2;
  Room room;
  const Unlocked unlocked;
  return walk_each(parents, tokens, report, [&](int64_t b, int64_t node, const Integers& path) {
    const auto at = static_cast<size_t>(b);
    const Draws draws = {logits.as<char>() + b * logits.stride[0] * bytes,
                         logits.stride[1],
                         logits.shape[2],
                         logits.dtype,
                         temperatures[at],
                         top_k[at],
                         seed ? &*seed : nullptr,
                         requests[at],
                         positions[at],
                         threads};
    return draw_one(draws, node, static_cast<int64_t>(path.size()), room);
  });
}

std::vector<Integers> walk_trees_drawing(const std::vector<Integers>& parents,
                                         PyObject* given_tokens, PyObject* given_report,
                                         PyObject* token_after) {
  const View tokens = view("tokens", given_tokens), report = view("report", given_report);
  return walk_each(parents, tokens, report, [&](int64_t b, int64_t node, const Integers& path) {
    const Object walked = to_python(path);
    const Object token = Object::made(PyObject_CallFunction(
        token_after, "LLO", static_cast<long long>(b), static_cast<long long>(node), walked.get()));
    return from_python<int64_t>(token.get());
  });
}

void keep_paths(PyObject* given_rows, PyObject* given_nodes, int64_t most, PyObject* given_kept,
                int64_t at) {
  const View rows = view("rows", given_rows), nodes = view("nodes", given_nodes);
  const View kept = view("kept", given_kept);
  rows.expect(rows.dtype, {-1, -1, -1});
  nodes.expect(Dtype::kInt64, {rows.shape[0], -1});
  kept.expect(rows.dtype, {rows.shape[0], -1, rows.shape[2]});
  check_index("most", most, 0, nodes.shape[1]);
  check_index("at", at, 0, kept.shape[1] - 1 - most);
  const int64_t bytes = kDlpackTypes[static_cast<size_t>(rows.dtype)].bits / 8;
  for (int64_t b = 0; b < rows.shape[0]; ++b) {
    const int64_t* path = nodes.as<int64_t>() + b * nodes.stride[0];
    const char* from = rows.as<char>() + b * rows.stride[0] * bytes;
    char* to = kept.as<char>() + (b * kept.stride[0] + at * kept.stride[1]) * bytes;
    for (int64_t step = 0; step <= most; ++step) {
      const int64_t node = step ? std::max<int64_t>(path[step - 1], 0) : 0;
      check_index("nodes", node, 0, rows.shape[1] - 1);
      std::memcpy(to + step * kept.stride[1] * bytes, from + node * rows.stride[1] * bytes,
                  static_cast<size_t>(rows.shape[2] * bytes));
    }
  }
}

}  // namespace

void add_walk(PyObject* module) {
  static PyMethodDef functions[] = {
      function<&walk_trees>(
          "walk_trees",
          "Per request the accepted tokens and the next one, drawn as add_gumbel_noise has it, or "
          "greedily where seed is None. In `report`: how many were accepted, the next token, and "
          "the accepted nodes, -1 behind them. Of `top_k` tokens each, of all where it is 0.",
          "logits", "parents", "tokens", "temperatures", "top_k", "seed", "requests", "positions",
          "report", "threads"),
      function<&walk_trees_drawing>(
          "walk_trees_drawing",
          "The same by any draws: `token_after(request, node, path)` returns the token that the "
          "target puts after a node, whose path are the tokens of `path`.",
          "parents", "tokens", "report", "token_after"),
      function<&keep_paths>(
          "keep_paths",
          "Copy the rows of each root and its first `most` accepted nodes, the root's again behind "
          "their end, of `rows` [B, T, F] into `kept` [B, N, F], from `at` on.",
          "rows", "nodes", "most", "kept", "at"),
      {}};
  if (PyModule_AddFunctions(module, functions)) throw PythonError();
}

}  // namespace specattn
