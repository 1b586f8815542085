// specattn._cpu.SuffixDrafter: drafting trees from a text's own repetitions.
#include <algorithm>
#include <functional>
#include <numeric>

#include "bindings.h"
#include "check.h"
#include "ranked.h"
#include "suffix.h"

using namespace specattn;

namespace {

Successors take_successors(const py::object& table) {
  Successors successors;
  const View view = {"successors", table};
  if (!view) return successors;
  view.expect(Dtype::kInt32, {-1, -1});
  successors.tokens = view.as<int32_t>();
  successors.vocabulary = view.shape[0], successors.k = view.shape[1];
  successors.row = view.stride[0];
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
  const py::gil_scoped_release release;
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

// The best trees as what a draft is made of: rows of its pass, parents of each request's nodes with
// its root, tokens that each is expected to gain. Writes the tokens of the nodes.
py::tuple draft_best(const std::vector<const SuffixDrafter*>& drafters,
                     const std::vector<int64_t>& depths, const PassTimes& times,
                     const View& drafted, const Successors& successors) {
  if (drafters.empty() || depths.size() != drafters.size()) {
    throw std::invalid_argument("depths must be as many as drafters, and one at least");
  }
  const auto batch = static_cast<int64_t>(drafters.size());
  drafted.expect(Dtype::kInt64, {-1});
  if (drafted.shape[0] < batch * times.rows.back()) drafted.fail("is too small");
  const std::vector<SuffixTree> trees = best_trees(drafters, depths, times, successors);
  size_t most = 1;
  for (const SuffixTree& tree : trees) most = std::max(most, 1 + tree.tokens.size());
  py::tuple shapes(trees.size()), gains(trees.size());
  int64_t* token = drafted.as<int64_t>();
  for (size_t b = 0; b < trees.size(); ++b) {
    const SuffixTree& tree = trees[b];
    py::tuple parents(1 + tree.parents.size());
    parents[0] = -1;
    for (size_t i = 0; i < tree.parents.size(); ++i) parents[i + 1] = tree.parents[i] + 1;
    shapes[b] = parents;
    gains[b] = std::accumulate(tree.probabilities.begin(), tree.probabilities.end(), 0.0);
    *token = drafters[b]->newest();
    std::copy(tree.tokens.begin(), tree.tokens.end(), token + 1);
    std::fill(token + 1 + tree.tokens.size(), token + most, 0);
    token += most;
  }
  return py::make_tuple(most, shapes, gains);
}

// A corpus with the tensors that it reads.
struct HeldCorpus : Corpus {
  HeldCorpus(py::object tokens, py::object order, int64_t vocabulary)
      : Corpus(read("tokens", tokens), read("order", order), size_of(tokens, order), vocabulary),
        held(py::make_tuple(tokens, order)) {}

  static View expected(const char* name, const py::object& tensor) {
    const View view = {name, tensor};
    view.expect(Dtype::kInt32, {-1});
    if (view.shape[0] > 1 && view.stride[0] != 1) view.fail("must be contiguous");
    return view;
  }
  static const int32_t* read(const char* name, const py::object& tensor) {
    return expected(name, tensor).as<int32_t>();
  }
  static int64_t size_of(const py::object& tokens, const py::object& order) {
    const int64_t size = expected("tokens", tokens).shape[0];
    expected("order", order).expect(Dtype::kInt32, {size});
    return size;
  }

  py::tuple held;
};

}  // namespace

void specattn::define_suffix(py::module_& m) {
  m.def(
      "learn",
      [](const std::vector<SuffixDrafter*>& drafters, const py::object& texts,
         const std::vector<int64_t>& rows, const std::vector<int64_t>& begins,
         const std::vector<int64_t>& ends, const py::object& table, const py::object& logits,
         const py::object& tokens, const py::object& nodes) {
        read_on(drafters, {"texts", texts}, rows, begins, ends, take_successors(table));
        if (logits.is_none()) return;
        rank_successors({"logits", logits}, {"tokens", tokens}, {"nodes", nodes},
                        {"successors", table});
      },
      py::arg("drafters"), py::arg("texts"), py::arg("rows"), py::arg("begins"), py::arg("ends"),
      py::arg("successors"), py::arg("logits") = py::none(), py::arg("tokens") = py::none(),
      py::arg("nodes") = py::none(),
      "Append what was generated to the texts; then note what was ranked best behind the root and "
      "the accepted nodes, -1 behind their end.");
  py::class_<PassTimes>(m, "PassTimes", "Seconds of a pass by its rows per request.")
      .def(py::init([](std::vector<int64_t> rows, std::vector<double> seconds) {
             if (rows.empty() || rows[0] < 1 || seconds.size() != rows.size() ||
                 std::adjacent_find(rows.begin(), rows.end(), std::greater_equal<>()) !=
                     rows.end()) {
               throw std::invalid_argument("rows must ascend from 1 or more, with as many seconds");
             }
             return PassTimes{std::move(rows), std::move(seconds)};
           }),
           py::arg("rows"), py::arg("seconds"));
  m.def(
      "best_trees",
      [](const std::vector<const SuffixDrafter*>& drafters, const std::vector<int64_t>& depths,
         const PassTimes& times, const py::object& drafted, const py::object& table) {
        return draft_best(drafters, depths, times, {"drafted", drafted}, take_successors(table));
      },
      py::arg("drafters"), py::arg("depths"), py::arg("times"), py::arg("drafted"),
      py::arg("successors") = py::none(),
      "Of trees as of `draft` those with which drafters gain the most tokens per second: rows of a "
      "pass, parents with the roots, tokens that each is expected to gain. Roots and nodes are "
      "written into `drafted`, row after row.");
  m.def(
      "sort_suffixes",
      [](const py::object& tokens, const py::object& order) {
        const View text = HeldCorpus::expected("tokens", tokens);
        View sorted = HeldCorpus::expected("order", order);
        sorted.expect(Dtype::kInt32, {text.shape[0]});
        const py::gil_scoped_release release;
        Corpus::sort(text.as<int32_t>(), text.shape[0], static_cast<int32_t*>(sorted.data));
      },
      py::arg("tokens"), py::arg("order"), "Fill `order` with the places of all suffixes.");
  py::class_<HeldCorpus, std::shared_ptr<HeldCorpus>>(m, "Corpus", "Texts that do not grow.")
      .def(py::init<py::object, py::object, int64_t>(), py::arg("tokens"), py::arg("order"),
           py::arg("vocabulary"))
      .def("__len__", [](const HeldCorpus& self) { return self.size(); })
      .def(
          "followers",
          [](const HeldCorpus& self, const std::vector<int32_t>& context, int most) {
            const auto size = static_cast<int64_t>(context.size());
            const Corpus::Match match = self.longest(context.data(), size, Corpus::kLongest);
            std::vector<std::pair<int32_t, int32_t>> found;
            self.followers(match, most, found);
            return std::make_pair(match.length, found);
          },
          py::arg("context"), py::arg("most") = 16,
          "Tokens of a context's longest end that occurs, and what follows it how often.");
  py::class_<SuffixDrafter>(m, "SuffixDrafter", "Trees of what followed a text's end before.")
      .def(py::init([](const std::vector<std::shared_ptr<HeldCorpus>>& corpora) {
             return std::make_unique<SuffixDrafter>(
                 std::vector<std::shared_ptr<const Corpus>>(corpora.begin(), corpora.end()));
           }),
           py::arg("corpora") = std::vector<std::shared_ptr<HeldCorpus>>())
      .def(
          "extend",
          [](SuffixDrafter& self, const std::vector<int32_t>& tokens, const py::object& table,
             bool generated) {
            const Successors successors = take_successors(table);
            const py::gil_scoped_release release;
            self.extend(tokens, successors, generated);
          },
          py::arg("tokens"), py::arg("successors") = py::none(), py::arg("generated") = false,
          "Append tokens to the text; what was generated corrects probabilities.")
      .def(
          "draft",
          [](const SuffixDrafter& self, int64_t nodes, int64_t depth, float least,
             const py::object& table) {
            const SuffixTree tree = self.draft(nodes, depth, least, take_successors(table));
            return py::make_tuple(tree.parents, tree.tokens, tree.probabilities);
          },
          py::arg("nodes"), py::arg("depth"), py::arg("least") = 0.0f,
          py::arg("successors") = py::none(),
          "Parents (-1: the text's end), tokens and path probabilities, the most probable first.")
      .def("__len__", [](const SuffixDrafter& self) { return self.automaton().size(); })
      .def_property_readonly(
          "match",
          [](const SuffixDrafter& self) {
            const auto& a = self.automaton();
            return a.state(a.match()).length;
          },
          "Tokens of the longest suffix that occurred before.")
      .def_property_readonly("bytes",
                             [](const SuffixDrafter& self) { return self.automaton().bytes(); });
}
