// specattn._cpu.SuffixDrafter: drafting trees from a text's own repetitions.
#include <algorithm>
#include <functional>
#include <numeric>

#include "../check.h"
#include "../ranked.h"
#include "../suffix.h"
#include "binder.h"
#include "module.h"
#include "values.h"

namespace specattn {

template <>
inline constexpr bool kIsClass<SuffixDrafter> = true;

namespace {

Successors take_successors(PyObject* table) {
  Successors successors;
  const View rows = view("successors", table);
  if (!rows) return successors;
  rows.expect(Dtype::kInt32, {-1, -1});
  successors.tokens = rows.as<int32_t>();
  successors.vocabulary = rows.shape[0], successors.k = rows.shape[1];
  successors.row = rows.stride[0];
  return successors;
}

template <class Elem>
void rank(const View& logits, const View& tokens, const View& nodes, const View& table) {
  const int64_t k = table.shape[1];
  for (int64_t b = 0; b < logits.shape[0]; ++b) {
    for (int64_t step = -1, node = 0; step < nodes.shape[1] && node >= 0;) {
      const Elem* row = logits.as<Elem>() + b * logits.stride[0] + node * logits.stride[1];
      const int64_t token = tokens.as<int64_t>()[b * tokens.stride[0] + node];
      largest(row, logits.shape[2], k, table.as<int32_t>() + token * table.stride[0]);
      if (++step < nodes.shape[1]) node = nodes.as<int64_t>()[b * nodes.stride[0] + step];
    }
  }
}

// Writes the best successors of the root's token and of those on the path of accepted nodes.
void rank_successors(const View& logits, const View& tokens, const View& nodes, const View& table) {
  if (logits.dims != 3 || logits.dtype > Dtype::kFloat16) {
    logits.fail("must have 3 dimensions and be float32, bfloat16 or float16");
  }
  const int64_t batch = logits.shape[0], size = logits.shape[1];
  tokens.expect(Dtype::kInt64, {batch, size});
  nodes.expect(Dtype::kInt64, {batch, -1});
  table.expect(Dtype::kInt32, {-1, -1});
  if (table.shape[1] > std::min(kMostRanked, logits.shape[2])) {
    table.fail("must keep at most 64 successors, and no more than there are tokens");
  }
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t i = 0; i < size; ++i) {
      check_index("tokens", tokens.as<int64_t>()[b * tokens.stride[0] + i], 0, table.shape[0] - 1);
    }
    for (int64_t i = 0; i < nodes.shape[1]; ++i) {
      check_index("nodes", nodes.as<int64_t>()[b * nodes.stride[0] + i], -1, size - 1);
    }
  }
  const Unlocked unlocked;
  if (logits.dtype == Dtype::kFloat32) return rank<float>(logits, tokens, nodes, table);
  if (logits.dtype == Dtype::kBFloat16) return rank<bf16>(logits, tokens, nodes, table);
  rank<fp16>(logits, tokens, nodes, table);
}

// Appends what was generated since to the drafters' texts. That of drafter i lies in row `rows[i]`
// of `texts`, from where `begins` says of the row to where `ends` does.
void read_on(const std::vector<SuffixDrafter*>& drafters, const View& texts,
             const std::vector<int64_t>& rows, const std::vector<int64_t>& begins,
             const std::vector<int64_t>& ends, const Successors& successors) {
  texts.expect(Dtype::kInt64, {-1, -1});
  const auto most = static_cast<size_t>(texts.shape[0]);
  if (rows.size() != drafters.size() || begins.size() != most || ends.size() != most) {
    throw std::invalid_argument("rows must be as many as drafters, begins and ends as texts");
  }
  std::vector<int32_t> tokens;
  for (size_t i = 0; i < drafters.size(); ++i) {
    check_index("rows", rows[i], 0, texts.shape[0] - 1);
    const auto row = static_cast<size_t>(rows[i]);
    const int64_t first = begins[row] + drafters[i]->automaton().size();
    check_index("ends", ends[row], first, texts.shape[1]);
    const int64_t* text = texts.as<int64_t>() + rows[i] * texts.stride[0];
    tokens.assign(text + first, text + ends[row]);
    drafters[i]->extend(tokens, successors, true);
  }
}

template <class T>
Object tuple_of(const std::vector<T>& items) {
  return Object::made(PyList_AsTuple(to_python(items).get()));
}

// The best trees as what a draft is made of: rows of its pass, parents of each request's nodes with
// its root and padding, tokens that each is expected to gain. Writes the tokens of the nodes.
std::tuple<size_t, Object, Object> draft_best(const std::vector<const SuffixDrafter*>& drafters,
                                              const std::vector<int64_t>& depths,
                                              const PassTimes& times, const View& drafted,
                                              const Successors& successors) {
  if (drafters.empty() || depths.size() != drafters.size()) {
    throw std::invalid_argument("depths must be as many as drafters, and one at least");
  }
  const auto batch = static_cast<int64_t>(drafters.size());
  drafted.expect(Dtype::kInt64, {-1});
  if (drafted.shape[0] < batch * times.rows.back()) drafted.fail("is too small");
  const std::vector<SuffixTree> trees = best_trees(drafters, depths, times, successors);
  size_t most = 1;
  for (const SuffixTree& tree : trees) most = std::max(most, 1 + tree.tokens.size());
  if (times.rows.size() > 1) {  // few sizes, so that each is met again
    const auto size = static_cast<int64_t>(most);
    most = static_cast<size_t>(*std::lower_bound(times.rows.begin(), times.rows.end(), size));
  }
  std::vector<Object> shapes;
  std::vector<double> gains;
  int64_t* token = drafted.as<int64_t>();
  for (size_t b = 0; b < trees.size(); ++b) {
    const SuffixTree& tree = trees[b];
    std::vector<int64_t> parents = {-1};
    for (const int32_t parent : tree.parents) parents.push_back(parent + 1);
    parents.resize(most, -1);
    shapes.push_back(tuple_of(parents));
    gains.push_back(std::accumulate(tree.probabilities.begin(), tree.probabilities.end(), 0.0));
    *token = drafters[b]->newest();
    std::copy(tree.tokens.begin(), tree.tokens.end(), token + 1);
    std::fill(token + 1 + tree.tokens.size(), token + most, 0);
    token += most;
  }
  return {most, tuple_of(shapes), tuple_of(gains)};
}

// A corpus with the tensors that it reads.
struct HeldCorpus : Corpus {
  HeldCorpus(PyObject* tokens, PyObject* order, int64_t vocabulary)
      : Corpus(read("tokens", tokens), read("order", order), size_of(tokens, order), vocabulary),
        tokens(Object::held(tokens)),
        order(Object::held(order)) {}

  static View expected(const char* name, PyObject* tensor) {
    const View given = view(name, tensor);
    given.expect(Dtype::kInt32, {-1});
    if (given.shape[0] > 1 && given.stride[0] != 1) given.fail("must be contiguous");
    return given;
  }
  static const int32_t* read(const char* name, PyObject* tensor) {
    return expected(name, tensor).as<int32_t>();
  }
  static int64_t size_of(PyObject* tokens, PyObject* order) {
    const int64_t size = expected("tokens", tokens).shape[0];
    expected("order", order).expect(Dtype::kInt32, {size});
    return size;
  }

  Object tokens, order;
};

}  // namespace

template <>
inline constexpr bool kIsClass<HeldCorpus> = true;

namespace {

std::shared_ptr<HeldCorpus> make_corpus(PyObject* tokens, PyObject* order, int64_t vocabulary) {
  return std::make_shared<HeldCorpus>(tokens, order, vocabulary);
}

int64_t size_of(const HeldCorpus& self) { return self.size(); }

std::tuple<int32_t, std::vector<std::tuple<int32_t, int32_t>>> followers(
    const HeldCorpus& self, const std::vector<int32_t>& context, std::optional<int> most) {
  const auto size = static_cast<int64_t>(context.size());
  const Corpus::Match match = self.longest(context.data(), size, Corpus::kLongest);
  std::vector<std::pair<int32_t, int32_t>> found;
  self.followers(match, most.value_or(16), found);
  return {match.length, {found.begin(), found.end()}};
}

void sort_suffixes(PyObject* tokens, PyObject* order) {
  const View text = HeldCorpus::expected("tokens", tokens);
  const View sorted = HeldCorpus::expected("order", order);
  sorted.expect(Dtype::kInt32, {text.shape[0]});
  const Unlocked unlocked;
  Corpus::sort(text.as<int32_t>(), text.shape[0], sorted.as<int32_t>());
}

std::shared_ptr<PassTimes> make_times(std::vector<int64_t> rows, std::vector<double> seconds) {
  if (rows.empty() || rows[0] < 1 || seconds.size() != rows.size() ||
      std::adjacent_find(rows.begin(), rows.end(), std::greater_equal<>()) != rows.end()) {
    throw std::invalid_argument("rows must ascend from 1 or more, with as many seconds");
  }
  return std::make_shared<PassTimes>(PassTimes{std::move(rows), std::move(seconds)});
}

std::tuple<size_t, Object, Object> find_best_trees(
    const std::vector<const SuffixDrafter*>& drafters, const std::vector<int64_t>& depths,
    const PassTimes* times, PyObject* drafted, PyObject* table) {
  return draft_best(drafters, depths, *times, view("drafted", drafted), take_successors(table));
}

void learn(const std::vector<SuffixDrafter*>& drafters, PyObject* texts,
           const std::vector<int64_t>& rows, const std::vector<int64_t>& begins,
           const std::vector<int64_t>& ends, PyObject* table, PyObject* logits, PyObject* tokens,
           PyObject* nodes) {
  read_on(drafters, view("texts", texts), rows, begins, ends, take_successors(table));
  if (logits == Py_None) return;
  rank_successors(view("logits", logits), view("tokens", tokens), view("nodes", nodes),
                  view("successors", table));
}

using Corpora = std::vector<std::shared_ptr<HeldCorpus>>;

std::shared_ptr<SuffixDrafter> make_drafter(const std::optional<Corpora>& given) {
  const Corpora corpora = given.value_or(Corpora());
  return std::make_shared<SuffixDrafter>(
      std::vector<std::shared_ptr<const Corpus>>(corpora.begin(), corpora.end()));
}

void extend(SuffixDrafter& self, const std::vector<int32_t>& tokens, PyObject* table,
            std::optional<bool> generated) {
  const Successors successors = take_successors(table);
  const Unlocked unlocked;
  self.extend(tokens, successors, generated.value_or(false));
}

std::tuple<std::vector<int32_t>, std::vector<int32_t>, std::vector<double>> draft(
    const SuffixDrafter& self, int64_t nodes, int64_t depth, std::optional<float> least,
    PyObject* table) {
  const SuffixTree tree = self.draft(nodes, depth, least.value_or(0), take_successors(table));
  return {tree.parents, tree.tokens, {tree.probabilities.begin(), tree.probabilities.end()}};
}

int64_t text_size(const SuffixDrafter& self) { return self.automaton().size(); }
int64_t match_of(const SuffixDrafter& self) {
  const auto& automaton = self.automaton();
  return automaton.state(automaton.match()).length;
}
int64_t bytes_of(const SuffixDrafter& self) {
  return static_cast<int64_t>(self.automaton().bytes());
}

void add_corpus(PyObject* module) {
  static PyMethodDef methods[] = {
      function<&followers>(
          "followers",
          "Tokens of a context's longest end that occurs, and what follows it how often.",
          "context", "most"),
      {}};
  add_class<HeldCorpus, &make_corpus>(module,
                                      {"specattn._cpu.Corpus", "Texts that do not grow.", methods,
                                       nullptr, &length_of<HeldCorpus, &size_of>},
                                      "tokens", "order", "vocabulary");
}

void add_drafter(PyObject* module) {
  static PyMethodDef methods[] = {
      function<&extend>("extend",
                        "Append tokens to the text; what was generated corrects probabilities.",
                        "tokens", "successors", "generated"),
      function<&draft>(
          "draft",
          "Parents (-1: the text's end), tokens and path probabilities, the most probable first.",
          "nodes", "depth", "least", "successors"),
      {}};
  static PyGetSetDef properties[] = {
      {"match", &property<&match_of>, nullptr, "Tokens of the longest suffix that occurred before.",
       nullptr},
      {"bytes", &property<&bytes_of>, nullptr, "Memory of the text's automaton.", nullptr},
      {}};
  add_class<SuffixDrafter, &make_drafter>(
      module,
      {"specattn._cpu.SuffixDrafter", "Trees of what followed a text's end before.", methods,
       properties, &length_of<SuffixDrafter, &text_size>},
      "corpora");
}

void add_times(PyObject* module) {
  static PyMethodDef none[] = {{}};
  add_class<PassTimes, &make_times>(
      module, {"specattn._cpu.PassTimes", "Seconds of a pass by its rows per request.", none},
      "rows", "seconds");
}

}  // namespace

void add_suffix(PyObject* module) {
  static PyMethodDef functions[] = {
      function<&learn>(
          "learn",
          "Append what was generated to the texts; then note what was ranked best behind the root "
          "and the accepted nodes, -1 behind their end.",
          "drafters", "texts", "rows", "begins", "ends", "successors", "logits", "tokens", "nodes"),
      function<&find_best_trees>(
          "best_trees",
          "Of trees as of `draft` those with which drafters gain the most tokens per second: rows "
          "of a pass, parents with the roots, tokens that each is expected to gain. Roots and "
          "nodes are written into `drafted`, row after row.",
          "drafters", "depths", "times", "drafted", "successors"),
      function<&sort_suffixes>("sort_suffixes", "Fill `order` with the places of all suffixes.",
                               "tokens", "order"),
      {}};
  if (PyModule_AddFunctions(module, functions)) throw PythonError();
  add_times(module);
  add_corpus(module);
  add_drafter(module);
}

}  // namespace specattn
