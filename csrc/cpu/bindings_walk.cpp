// Walks down drafted trees along the target's own draws, on the host: specattn/acceptance.py has
// the same walk for draws of any kind.
#include <limits>

#include "bindings.h"
#include "check.h"
#include "ranked.h"
#include "run.h"

using namespace specattn;

namespace {

using Integers = std::vector<int64_t>;

// What one request draws its tokens from.
struct Draws {
  Dtype dtype;
  float temperature;
  const uint64_t* seed;  // null: greedily
  int64_t request, position;
  int threads;
};

// Draws the token after a node from its logits: -1 if none can follow.
template <class Elem>
int64_t draw(const Elem* logits, int64_t count, const Draws& draws, int64_t steps, float* scores) {
  GumbelNoise noise = {};
  noise.logits = logits, noise.dtype = draws.dtype;
  if (draws.temperature != 1.0f) {
    for (int64_t i = 0; i < count; ++i) scores[i] = to_float(logits[i]) / draws.temperature;
    noise.logits = scores, noise.dtype = Dtype::kFloat32;
  }
  if (!draws.seed) {
    return noise.logits == logits ? first_largest(logits, count) : first_largest(scores, count);
  }
  const int64_t position = draws.position + steps;
  noise.n = 1, noise.vocabulary = count, noise.out = scores, noise.seed = *draws.seed;
  noise.requests = &draws.request, noise.positions = &position;
  run(noise, draws.threads);
  return first_largest(scores, count);
}

// One request's walk. `emitted` are the accepted tokens and the next one; returns the last node.
template <class Elem>
int64_t walk(const View& logits, int64_t b, const Integers& parents, const int64_t* tokens,
             const Draws& draws, std::vector<float>& scores, Integers& emitted) {
  const auto size = static_cast<int64_t>(parents.size());
  std::vector<char> reached(parents.size()), below(parents.size());
  reached[0] = 1;
  for (int64_t node = 0;;) {
    const Elem* row = logits.as<Elem>() + b * logits.stride[0] + node * logits.stride[1];
    const auto steps = static_cast<int64_t>(emitted.size());
    emitted.push_back(draw(row, logits.shape[2], draws, steps, scores.data()));
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

std::vector<Integers> walk_trees(const py::object& given_logits,
                                 const std::vector<Integers>& parents,
                                 const py::object& given_tokens,
                                 const std::vector<float>& temperatures,
                                 std::optional<uint64_t> seed, const Integers& requests,
                                 const Integers& positions, const py::object& given_report,
                                 int threads) {
  const View logits = {"logits", given_logits}, tokens = {"tokens", given_tokens};
  const View report = {"report", given_report};
  if (logits.dims != 3 || logits.dtype > Dtype::kFloat16) {
    logits.fail("must have 3 dimensions and be float32, bfloat16 or float16");
  }
  const int64_t batch = logits.shape[0], size = logits.shape[1];
  tokens.expect(Dtype::kInt64, {batch, size});
  report.expect(Dtype::kInt64, {batch, -1});
  const auto count = static_cast<size_t>(batch);
  if (temperatures.size() != count || requests.size() != count || positions.size() != count) {
    logits.fail("must be of as many requests as there are temperatures, requests and positions");
  }
  if (parents.size() != 1 && parents.size() != count) {
    throw std::invalid_argument("parents must be of one tree, or of one for each request");
  }
  for (const Integers& tree : parents) {
    if (static_cast<int64_t>(tree.size()) != size || size == 0 || tree[0] != -1) {
      throw std::invalid_argument("parents must have as many nodes as logits, the root's -1 first");
    }
    for (size_t n = 1; n < tree.size(); ++n) {
      check_index("parents", tree[n], -1, static_cast<int64_t>(n) - 1);
    }
  }
  std::vector<Integers> emitted(count);
  const py::gil_scoped_release release;
  std::vector<float> scores(static_cast<size_t>(logits.shape[2]));
  for (size_t b = 0; b < count; ++b) {
    const auto row = static_cast<int64_t>(b);
    const Integers& tree = parents[parents.size() == 1 ? 0 : b];
    const Draws draws = {logits.dtype, temperatures[b], seed ? &*seed : nullptr,
                         requests[b],  positions[b],    threads};
    const auto one = logits.dtype == Dtype::kFloat32    ? walk<float>
                     : logits.dtype == Dtype::kBFloat16 ? walk<bf16>
                                                        : walk<fp16>;
    int64_t node = one(logits, row, tree, tokens.as<int64_t>() + row * tokens.stride[0], draws,
                       scores, emitted[b]);
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

}  // namespace

void specattn::define_walk(py::module_& m) {
  m.def("walk_trees", &walk_trees, py::arg("logits"), py::arg("parents"), py::arg("tokens"),
        py::arg("temperatures"), py::arg("seed"), py::arg("requests"), py::arg("positions"),
        py::arg("report"), py::arg("threads"),
        "Per request the accepted tokens and the next one, drawn as add_gumbel_noise has it, or "
        "greedily where seed is None. In `report`: how many were accepted, the next token, and the "
        "accepted nodes, -1 behind them.");
}
